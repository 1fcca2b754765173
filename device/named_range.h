// A stretch of the host's time with a name of the code's, for profilers: LibTorch's own, the one of a
// rank's steps (zeropage/event_sink.h), and, in a build with CUDA, Nsight Systems by NVTX. Costs some 10 ns
// where none is attached.
#pragma once

#include <ATen/record_function.h>

#include "zeropage/event_sink.h"

namespace zeropage::device {

class NamedRange {
 public:
  // name: lives as long as the range.
  explicit NamedRange(const char* name);
  ~NamedRange();
  NamedRange(const NamedRange&) = delete;
  NamedRange& operator=(const NamedRange&) = delete;

 private:
  at::RecordFunction for_libtorch_{at::RecordScope::USER_SCOPE};
  const memory::SpanScope for_sink_;
};

}  // namespace zeropage::device

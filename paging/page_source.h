// Where pages come from, and where what was written to them goes.
//
// Lifetime: its pager owns it.
// Threads: called under the pager's mutex.
// Throws: whatever goes wrong; the operator that needs the page throws it.
#pragma once

#include <cstddef>

#include <ATen/core/TensorBody.h>

#include "zeropage/detail/pending.h"

namespace zeropage::paging {

// A page's bytes on their way: valid once `arrival` has ended.
struct Fetch {
  at::Tensor buffer;  // 1-D, contiguous, of the page's dtype
  memory::Pending arrival;
};

class PageSource {
 public:
  virtual ~PageSource() = default;
  virtual Fetch start_fetch(size_t page) = 0;
  // buffer: of the page, written to since it came. Has ended, or is enqueued, before it returns.
  virtual void write_back(size_t page, const at::Tensor& buffer) = 0;
  // The page's buffer is about to be let go: what was enqueued to the calling thread's current stream
  // still uses it.
  virtual void end_use(size_t /*page*/) {}
  // What pages are made of may change from here on.
  virtual void end_pass() {}
};

}  // namespace zeropage::paging

// The operation that the calling thread asks a communicator for, as who looks at the rank hears of it
// (zeropage/event_sink.h). Costs a relaxed load where nobody looks.
//
// A communicator of the host that performs it later, on a ProgressThread, tells of that time. Otherwise the
// moment of the call is told, such as when an accelerator has been given the operation. A communicator
// that passes the operation on to another is told of once.
//
// Lifetime: a scope on the thread that calls. Threads: that one; told() is called within it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <ATen/core/TensorBody.h>

#include "zeropage/event_sink.h"

namespace zeropage::comm::detail {

class AnnouncedCall {
 public:
  // operation: outlives the program. what: of it; outlives this.
  AnnouncedCall(const char* operation, const std::string& what);
  ~AnnouncedCall();
  AnnouncedCall(const AnnouncedCall&) = delete;
  AnnouncedCall& operator=(const AnnouncedCall&) = delete;

  // One of the tensors that it moves.
  void moves(const at::Tensor& tensor);

  // The same task, which tells of the time in which it is performed.
  static std::function<void()> told(std::function<void()> task);

 private:
  memory::Span span() const;

  const char* const operation_;
  const std::string& what_;
  std::shared_ptr<memory::EventSink> sink_;  // null: nobody looks
  AnnouncedCall* before_ = nullptr;
  int64_t bytes_ = 0;
  bool is_told_ = false;
};

}  // namespace zeropage::comm::detail

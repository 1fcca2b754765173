// Something in flight (a copy, a collective) as a value that owns its buffers.
//
// Lifetime: the tensors given to it stay alive until the last copy of the Pending is gone.
// Threads: a Pending is waited for by one thread at a time; copies may be waited for by several.
#pragma once

#include <chrono>
#include <future>
#include <utility>
#include <vector>

#include <ATen/core/TensorBody.h>

namespace zeropage::memory {

class Pending {
 public:
  // Nothing in flight: wait() returns at once.
  Pending() = default;
  Pending(std::shared_future<void> done, std::vector<at::Tensor> buffers)
      : done_(std::move(done)), buffers_(std::move(buffers)) {}

  // Blocks until the operation has ended. Rethrows its error, at every call.
  void wait() const {
    if (done_.valid()) done_.get();
  }

  bool done() const {
    return !done_.valid() || done_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

 private:
  std::shared_future<void> done_;
  std::vector<at::Tensor> buffers_;
};

}  // namespace zeropage::memory

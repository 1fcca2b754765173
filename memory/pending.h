// Something in flight (a copy, a collective) as a value that owns its buffers.
//
// Lifetime: the tensors given to it stay alive until the last copy of the Pending is gone.
// Threads: a Pending is waited for by one thread at a time; copies may be waited for by several.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <utility>
#include <vector>

#include <ATen/core/TensorBody.h>

namespace zeropage::memory {

class Pending {
 public:
  // Nothing in flight: wait() returns at once.
  Pending() = default;
  // help: called by who waits, to bring the end nearer with the thread that would only sleep; it
  // may return before the end.
  Pending(std::shared_future<void> done, std::vector<at::Tensor> buffers,
          std::function<void()> help = {})
      : done_(std::move(done)), buffers_(std::move(buffers)), help_(std::move(help)) {}

  // Blocks until the operation has ended. Rethrows its error, at every call.
  void wait() const {
    if (!done_.valid()) return;
    if (help_ && !done()) help_();
    done_.get();
  }

  bool done() const {
    return !done_.valid() || done_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

 private:
  std::shared_future<void> done_;
  std::vector<at::Tensor> buffers_;
  std::function<void()> help_;
};

}  // namespace zeropage::memory

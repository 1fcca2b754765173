// Something in flight (a copy, a collective) as a value that owns its buffers.
//
// It has a part on the host, which runs beside the caller, or one on a device, which ends with an
// event, or first the one and then the other.
//
// Lifetime: the tensors given to it stay alive until the last copy of the Pending is gone.
// Threads: a Pending is waited for by one thread at a time; copies may be waited for by several.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <vector>

#include <ATen/core/TensorBody.h>

namespace zeropage::memory {

class Pending {
 public:
  // device/pending_on_device.h.
  struct OnDevice;

  // A Pending with nothing in flight: wait() returns at once.
  Pending() = default;
  // help: called by who waits, to bring the end nearer with the thread that would only sleep; it
  // may return before the end.
  Pending(std::shared_future<void> done, std::vector<at::Tensor> buffers,
          std::function<void()> help = {});
  Pending(OnDevice on_device, std::vector<at::Tensor> buffers);
  // First the one, then the other.
  Pending(const Pending& on_host, std::shared_ptr<const OnDevice> on_device);

  // Blocks until the part on the host has ended, and makes the calling thread's current stream of
  // the device wait for the part there: what is enqueued from here on finds it done. Rethrows its
  // error, at every call.
  void wait() const;
  // Blocks until all of it has ended.
  void synchronize() const;
  bool done() const;

  // The same end, for who waits while somebody else keeps the buffers.
  Pending without_buffers() const;

 private:
  bool host_is_done() const;
  void wait_for_host() const;

  std::shared_future<void> done_;
  std::vector<at::Tensor> buffers_;
  std::function<void()> help_;
  std::shared_ptr<const OnDevice> on_device_;
};

}  // namespace zeropage::memory

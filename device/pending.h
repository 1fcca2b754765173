// Something in flight (a copy, a collective) as a value that owns its buffers.
//
// It has a part on the host, which runs beside the caller, or one on a device, which ends with an
// event, or first the one and then the other.
//
// Lifetime: the tensors given to it stay alive until the last copy of the Pending is gone.
// Threads: a Pending is waited for by one thread at a time; copies may be waited for by several.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "device/stream.h"

namespace zeropage::memory {

class Pending {
 public:
  struct OnDevice {
    c10::Device device;
    Event end;  // recorded before the part on the host has ended
    // Throws what went wrong on the device, once that is known. May be empty.
    std::function<void()> check;
  };

  // Nothing in flight: wait() returns at once.
  Pending() = default;
  // help: called by who waits, to bring the end nearer with the thread that would only sleep; it
  // may return before the end.
  Pending(std::shared_future<void> done, std::vector<at::Tensor> buffers,
          std::function<void()> help = {})
      : done_(std::move(done)), buffers_(std::move(buffers)), help_(std::move(help)) {}
  Pending(OnDevice on_device, std::vector<at::Tensor> buffers)
      : buffers_(std::move(buffers)),
        on_device_(std::make_shared<const OnDevice>(std::move(on_device))) {}
  // First the one, then the other.
  Pending(const Pending& on_host, std::shared_ptr<const OnDevice> on_device) : Pending(on_host) {
    on_device_ = std::move(on_device);
  }

  // Blocks until the part on the host has ended, and makes the calling thread's current stream of
  // the device wait for the part there: what is enqueued from here on finds it done. Rethrows its
  // error, at every call.
  void wait() const {
    wait_for_host();
    if (!on_device_) return;
    if (on_device_->check) on_device_->check();
    Stream::current(on_device_->device).wait(on_device_->end);
  }

  // Blocks until all of it has ended.
  void synchronize() const {
    wait_for_host();
    if (!on_device_) return;
    on_device_->end.synchronize();
    if (on_device_->check) on_device_->check();
  }

  // The same end, for who waits while somebody else keeps the buffers.
  Pending without_buffers() const {
    Pending end = *this;
    end.buffers_.clear();
    return end;
  }

  bool done() const { return host_is_done() && (!on_device_ || on_device_->end.passed()); }

 private:
  bool host_is_done() const {
    return !done_.valid() || done_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  void wait_for_host() const {
    if (!done_.valid()) return;
    if (help_ && !host_is_done()) help_();
    done_.get();
  }

  std::shared_future<void> done_;
  std::vector<at::Tensor> buffers_;
  std::function<void()> help_;
  std::shared_ptr<const OnDevice> on_device_;
};

}  // namespace zeropage::memory

#include "device/pending_on_device.h"

#include <chrono>
#include <utility>

#include "zeropage/event_sink.h"

namespace zeropage::memory {

Pending::Pending(std::shared_future<void> done, std::vector<at::Tensor> buffers,
                 std::function<void()> help)
    : done_(std::move(done)), buffers_(std::move(buffers)), help_(std::move(help)) {}

Pending::Pending(OnDevice on_device, std::vector<at::Tensor> buffers)
    : buffers_(std::move(buffers)),
      on_device_(std::make_shared<const OnDevice>(std::move(on_device))) {}

Pending::Pending(const Pending& on_host, std::shared_ptr<const OnDevice> on_device)
    : Pending(on_host) {
  on_device_ = std::move(on_device);
}

void Pending::wait() const {
  wait_for_host();
  if (!on_device_) return;
  if (on_device_->check) on_device_->check();
  device::Stream::current(on_device_->device).wait(on_device_->end);
}

void Pending::synchronize() const {
  wait_for_host();
  if (!on_device_) return;
  {
    const SpanScope span(Span::What::kWait, OwnerScope::current().name);
    on_device_->end.synchronize();
  }
  if (on_device_->check) on_device_->check();
}

bool Pending::done() const {
  return host_is_done() && (!on_device_ || on_device_->end.passed());
}

Pending Pending::without_buffers() const {
  Pending end = *this;
  end.buffers_.clear();
  return end;
}

bool Pending::host_is_done() const {
  return !done_.valid() || done_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

void Pending::wait_for_host() const {
  if (!done_.valid()) return;
  if (!host_is_done()) {
    const SpanScope span(Span::What::kWait, OwnerScope::current().name);
    if (help_) help_();
    done_.wait();
  }
  done_.get();
}

}  // namespace zeropage::memory

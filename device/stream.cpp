#include "device/stream.h"

#include <atomic>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace zeropage::device {
namespace {

thread_local int64_t simulated_of_thread = 0;

}  // namespace

bool has_streams(c10::DeviceType device) {
  return device != c10::DeviceType::CPU && device != c10::DeviceType::Meta;
}

Stream Stream::current(c10::Device device) {
  if (device.is_meta()) return Stream(simulated_of_thread);
  if (!has_streams(device.type())) return {};
  return Stream(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

Stream Stream::another(c10::Device device) {
  if (device.is_meta()) {
    static std::atomic<int64_t> streams{0};
    return Stream(++streams);
  }
  if (!has_streams(device.type())) return {};
  return Stream(c10::impl::VirtualGuardImpl(device.type()).getNewStream(device));
}

Event Stream::record() const {
  if (!stream_) return {};
  auto event = std::make_shared<c10::Event>(stream_->device_type());
  event->record(*stream_);
  return Event(std::move(event));
}

void Stream::wait(const Event& event) const {
  if (stream_ && event.event_) event.event_->block(*stream_);
}

int64_t simulated_stream() {
  return simulated_of_thread;
}

StreamScope::StreamScope(const Stream& stream)
    : guard_(stream.stream_),
      simulated_before_(std::exchange(simulated_of_thread, stream.simulated_)) {}

StreamScope::~StreamScope() {
  simulated_of_thread = simulated_before_;
}

}  // namespace zeropage::device

#include "device/stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace zeropage::memory {

bool has_streams(c10::DeviceType device) {
  return device != c10::DeviceType::CPU && device != c10::DeviceType::Meta;
}

Stream Stream::current(c10::Device device) {
  if (!has_streams(device.type())) return {};
  return Stream(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

Stream Stream::another(c10::Device device) {
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

}  // namespace zeropage::memory

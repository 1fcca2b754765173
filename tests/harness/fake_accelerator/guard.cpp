#include "tests/harness/fake_accelerator/guard.h"

#include <array>
#include <atomic>
#include <memory>

#include "tests/harness/fake_accelerator/allocator.h"
#include "tests/harness/fake_accelerator/counters.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "tests/harness/fake_accelerator/stream.h"

namespace zeropage::testing {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr StreamId kPoolStreams = 8;  // ids 1 to 8; getNewStream's come after

thread_local DeviceIndex current_device = 0;
thread_local std::array<StreamId, kFakeDevices> current_stream{};

Stream stream_of(DeviceIndex device, StreamId id) {
  return Stream(Stream::UNSAFE, fake_device(device), id);
}

using EventHandle = std::shared_ptr<FakeEvent>;

FakeEvent& event_of(void* event) {
  return **static_cast<EventHandle*>(event);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  DeviceIndex deviceCount() const noexcept override { return kFakeDevices; }

  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return fake_device(current_device); }
  void setDevice(Device device) const override {
    if (!device.has_index()) return;
    TORCH_CHECK(device.is_privateuseone() && device.index() < kFakeDevices,
                "there are fake:0 to fake:", kFakeDevices - 1, ", not ", device);
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }

  Stream getStream(Device device) const override { return current_fake_stream(device.index()); }
  Stream getDefaultStream(Device device) const override {
    return stream_of(fake_index(device.index()), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return stream_of(fake_index(device.index()), 1 + next_of_pool_++ % kPoolStreams);
  }
  Stream getNewStream(Device device, int) const override {
    return stream_of(fake_index(device.index()), kPoolStreams + 1 + next_new_++);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = current_fake_stream(stream.device_index());
    current_stream.at(static_cast<size_t>(stream.device_index())) = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override { return fake_stream(stream).is_idle(); }
  void synchronizeStream(const Stream& stream) const override {
    ++live_counters().host_syncs;
    fake_stream(stream).wait();
    rethrow_task_error(stream.device_index());
  }
  void synchronizeDevice(DeviceIndex device) const override {
    ++live_counters().device_syncs;
    wait_for_fake_device(fake_index(device));
    rethrow_task_error(fake_index(device));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    record_on_fake_stream(data, stream);
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventHandle(std::make_shared<FakeEvent>());
    const EventHandle handle = *static_cast<EventHandle*>(*event);
    const uint64_t version = handle->begin_record(stream.device_index());
    fake_stream(stream).enqueue("an event", [handle, version] { handle->reach(version); });
  }
  void block(void* event, const Stream& stream) const override {
    if (event == nullptr) return;
    const EventHandle handle = *static_cast<EventHandle*>(event);
    const uint64_t version = handle->recorded();
    fake_stream(stream).enqueue("a wait for an event",
                                [handle, version] { handle->wait(version); });
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || event_of(event).has_reached(event_of(event).recorded());
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    ++live_counters().host_syncs;
    event_of(event).wait(event_of(event).recorded());
    rethrow_task_error(event_of(event).device());
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<EventHandle*>(event);
  }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override {
    TORCH_CHECK(begin && end, "elapsedTime() needs two events that were recorded");
    const auto elapsed = event_of(end).reached_at() - event_of(begin).reached_at();
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }

 private:
  mutable std::atomic<StreamId> next_of_pool_{0};
  mutable std::atomic<StreamId> next_new_{0};
};

}  // namespace

const c10::impl::DeviceGuardImplInterface& fake_guard() {
  static const auto* const guard = new Guard;
  return *guard;
}

DeviceIndex fake_index(DeviceIndex index) {
  return index < 0 ? current_device : index;
}

Stream current_fake_stream(DeviceIndex device) {
  const DeviceIndex index = fake_index(device);
  return stream_of(index, current_stream.at(static_cast<size_t>(index)));
}

}  // namespace zeropage::testing

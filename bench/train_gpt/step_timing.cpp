#include "bench/train_gpt/step_timing.h"

#include <algorithm>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace train_gpt {
namespace {

constexpr double kSecondsPerMillisecond = 1e-3;

// Null on a host.
std::shared_ptr<const c10::Event> now_on(torch::Device device) {
  if (!zeropage::device::has_streams(device.type())) return nullptr;
  const auto event = std::make_shared<c10::Event>(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  event->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

}  // namespace

StepStart::StepStart(torch::Device device) : on_host_(Clock::now()), on_device_(now_on(device)) {}

StepInFlight::StepInFlight(StepStart start, const torch::Tensor& loss)
    : start_(std::move(start)),
      loss_(start_.on_device_ ? zeropage::device::start_copy_to_host(loss.detach())
                              : zeropage::device::ArrivingCopy{loss.detach(), {}}),
      enqueued_(Clock::now()),
      ended_(now_on(loss.device())) {}

double StepInFlight::seconds() const {
  loss_.arrived.synchronize();
  if (!ended_) return std::chrono::duration<double>(enqueued_ - start_.on_host_).count();
  ended_->synchronize();
  return start_.on_device_->elapsedTime(*ended_) * kSecondsPerMillisecond;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

}  // namespace train_gpt

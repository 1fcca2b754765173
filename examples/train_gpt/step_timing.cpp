#include "examples/train_gpt/step_timing.h"

#include <algorithm>

namespace train_gpt {

StepInFlight::StepInFlight(const torch::Tensor& loss, Clock::time_point start)
    : start_(start), loss_(loss.detach()) {
  const torch::Device device = loss.device();
  if (zeropage::memory::has_streams(device.type())) {
    loss_ = torch::empty(loss.sizes(), torch::TensorOptions(loss.dtype()).pinned_memory(true));
    loss_.copy_(loss.detach(), /*non_blocking=*/true);
  }
  passed_ = zeropage::memory::Stream::current(device).record();
  enqueued_ = Clock::now();
}

Clock::time_point StepInFlight::wait() const {
  if (loss_.is_pinned()) passed_.synchronize();
  return loss_.is_pinned() ? Clock::now() : enqueued_;
}

double StepTimer::seconds_of(const StepInFlight& step) {
  const Clock::time_point end = step.wait();
  const std::chrono::duration<double> seconds = end - std::max(step.start(), last_end_);
  last_end_ = end;
  return seconds.count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

}  // namespace train_gpt

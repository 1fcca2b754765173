#include "bench/train_gpt/step_timing.h"

#include <algorithm>

namespace train_gpt {

StepInFlight::StepInFlight(const torch::Tensor& loss, Clock::time_point start)
    : start_(start), is_on_device_(zeropage::memory::has_streams(loss.device().type())) {
  loss_ = is_on_device_ ? zeropage::memory::start_copy_to_host(loss.detach())
                        : zeropage::memory::ArrivingCopy{loss.detach(), {}};
  enqueued_ = Clock::now();
}

Clock::time_point StepInFlight::wait() const {
  loss_.arrived.synchronize();
  return is_on_device_ ? Clock::now() : enqueued_;
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

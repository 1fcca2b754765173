#include "train_imagenet/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace train_imagenet {

double base_rate(const Config& config) {
  const OptimizerKeys& optimizer = config.optimizer;
  if (optimizer.reference_batch == 0) return optimizer.learning_rate;
  return optimizer.learning_rate * static_cast<double>(config.train.batch) /
         static_cast<double>(optimizer.reference_batch);
}

double rate_at(const Config& config, double epochs) {
  const ScheduleKeys& schedule = config.schedule;
  const double base = base_rate(config);
  if (epochs < schedule.warmup_epochs) {
    const double risen = epochs / schedule.warmup_epochs;
    return base * (schedule.warmup_factor + (1 - schedule.warmup_factor) * risen);
  }
  switch (schedule.name) {
    case ScheduleName::kConstant:
      return base;
    case ScheduleName::kCosine: {
      const double all = static_cast<double>(config.train.epochs) - schedule.warmup_epochs;
      const double part = std::min(1.0, (epochs - schedule.warmup_epochs) / all);
      return base * (1 + std::cos(std::numbers::pi * part)) / 2;
    }
    case ScheduleName::kStep: {
      const auto falls =
          std::count_if(schedule.step_epochs.begin(), schedule.step_epochs.end(),
                        [&](int64_t at) { return static_cast<double>(at) <= epochs; });
      return base * std::pow(schedule.step_factor, static_cast<double>(falls));
    }
  }
  return base;
}

}  // namespace train_imagenet

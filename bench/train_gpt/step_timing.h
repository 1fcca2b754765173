// How long training steps take, on a host as on a device that works after the host has gone on. Nothing in it
// trains, so every loop that is compared is timed by it.
#pragma once

#include <chrono>
#include <vector>

#include <torch/torch.h>

#include "device/page_locked.h"

namespace train_gpt {

using Clock = std::chrono::steady_clock;

// A step whose work may still be on its way on the device. Made when all of it is enqueued.
class StepInFlight {
 public:
  StepInFlight(const torch::Tensor& loss, Clock::time_point start);

  // Waits for its end, and returns when that was, as the host saw it.
  Clock::time_point wait() const;
  Clock::time_point start() const { return start_; }
  double loss() const { return loss_.values.item<double>(); }  // after wait()

 private:
  Clock::time_point start_;
  bool is_on_device_;
  zeropage::memory::ArrivingCopy loss_;  // on the host
  Clock::time_point enqueued_;
};

// Steps that follow each other: a device begins one once it has ended the one before.
class StepTimer {
 public:
  // Waits for the end of `step`, and returns how long it took.
  double seconds_of(const StepInFlight& step);

 private:
  Clock::time_point last_end_;
};

double median(std::vector<double> values);  // [1 or more]

}  // namespace train_gpt

// How long training steps take, on a host as on a device that works after the host has gone on. Nothing in it
// trains, so every loop that is compared is timed by it.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include <c10/core/Event.h>
#include <torch/torch.h>

#include "device/page_locked.h"

namespace train_gpt {

using Clock = std::chrono::steady_clock;

// Where a step begins: now on a host, and on a device where its work comes to what is enqueued next. A host that is
// ahead enqueues it long before.
class StepStart {
 public:
  explicit StepStart(torch::Device device);

 private:
  friend class StepInFlight;
  Clock::time_point on_host_;
  std::shared_ptr<const c10::Event> on_device_;  // null on a host
};

// A step whose work may still be on its way on the device. Made when all of it is enqueued.
class StepInFlight {
 public:
  StepInFlight(StepStart start, const torch::Tensor& loss);

  // From its start to its end on the device where it has one, and to here on a host. Waits for it.
  double seconds() const;
  double loss() const { return loss_.values.item<double>(); }  // after seconds()

 private:
  StepStart start_;
  zeropage::device::ArrivingCopy loss_;  // on the host
  Clock::time_point enqueued_;
  std::shared_ptr<const c10::Event> ended_;
};

double median(std::vector<double> values);  // [1 or more]

}  // namespace train_gpt

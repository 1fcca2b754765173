// Times contenders one after the other, round by round, with Google Benchmark.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "bench/collectives/figures.h"

namespace optimizer_step {

struct Contender {
  std::string name;
  std::function<void()> run;  // once; queued, where the device has a stream
};

// Seconds of each contender in every round. Runs each once before.
std::vector<collectives::Spread> time_interleaved(const std::vector<Contender>& all,
                                                  const c10::Device& device, int rounds);

}  // namespace optimizer_step

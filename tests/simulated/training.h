// The loop of a simulated run: a model of 2312 elements in three pages, whose batches and dropout follow from the step and the rank.
//
// Threads: a rank's, each its own call.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tests/simulated/ending.h"
#include "zeropage/survive.h"

namespace zeropage::simulated {

struct Hooks {
  std::function<void()> resumes = [] {};
  std::function<void(int64_t step)> resumed = [](int64_t) {};
  std::function<void(int64_t step)> before_step = [](int64_t) {};
  std::function<void(int64_t step)> after_step = [](int64_t) {};
};

// run: null for a run without copies.
Ending train(comm::World& world, SurvivingRun* run, const Training& training, int64_t steps,
             const Hooks& hooks = {});

}  // namespace zeropage::simulated

// What memory_profile runs: a model, a stage, and what becomes of activations.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <zeropage/profiler.h>
#include <zeropage/world.h>

namespace memory_profile {

struct Case {
  std::string name;  // "gpt, stage 3, recomputed"
  // Trains it for three steps, and records the third as that step. Collective.
  std::function<void(const zeropage::comm::World& world, zeropage::profile::Profiler& profiler,
                     int64_t number)>
      run;
};

// "gpt", "resnet18", "lstm".
std::vector<std::string> model_names();

// Those models at every stage with every policy, in the order of the table.
std::vector<Case> cases_of(const std::vector<std::string>& models);

}  // namespace memory_profile

// What makes a step fit that has run out of memory: changes of the script and its options, each with the peak that a step
// would have with it. Stages and offload are computed by the byte plan. Activations are what the step itself had taken when
// it failed, with a part more for what was still to come, and shrink with the micro-batch.
//
// Pure. Threads: any.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory/memory_limit.h"
#include "zero/plan/byte_plan.h"
#include "zero/setup/step_facts.h"
#include "zeropage/options.h"

namespace zeropage::zero {

// A forecast may be that part of a limit too low (tests/proofs/planned_figures_test.cpp has 3 %).
inline constexpr int64_t kForecastMarginPart = 32;

// A model whose memory is limited. A value.
struct LimitedModel {
  Options options;
  std::vector<PageLayout> layouts;
  PlacesOfRank places = PlaceOfRank();
  bool device_is_host = false;
  bool is_wrapped = true;  // else its parameters are an optimizer's alone
  memory::MemoryLimits limits;
};

// Lines, the cheapest change first: a smaller micro-batch, recompute, a higher stage, offload. What does not suffice by
// itself is tried together with others. If nothing does, the lines say how little the best of all needs.
std::string advice_on_memory(const LimitedModel& model, const StepFacts::Values& facts,
                             const memory::MemoryShortage& shortage);

}  // namespace zeropage::zero

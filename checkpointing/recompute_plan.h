// Which of the values that autograd saves are dropped after forward and computed again in backward,
// so that a step fits a budget of bytes at the least extra time.
//
//   RecomputePlan plan = plan_recompute(step, 4_GiB);
//   plan.dropped[value];           // computed again when backward needs it
//   plan.forecast.replay_seconds;  // what that adds to the step
//
// A dropped value comes back by a replay of its operator from the operator's inputs: what is kept
// and leaves are at hand, dropped inputs are replayed first, and so are inputs that were never
// saved, which are freed within the replay. A replay runs its operators in recorded order. An
// operator yields all its outputs; those that were dropped stay until their last release, so that
// each of them is replayed once. What a later replay still reads, kept or replayed, stays until
// then.
//
// Lifetime: plain values; nothing outlives a call. Threads: pure functions, the same plan for the
// same step. Units: bytes, seconds; values, operators and ticks are indices into RecordedStep.
// Throws c10::Error on a step that contradicts itself and where no plan that was tried fits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "checkpointing/recorded_step.h"

namespace zeropage::checkpointing {

struct RecomputePlan {
  std::vector<bool> dropped;  // [values]
  Forecast forecast;
  size_t simulations = 0;  // that the search took
};

// [values]: whether a plan may drop it.
std::vector<bool> droppable_values(const RecordedStep& step);

// What a step would take that drops `dropped` [values], whoever chose them. Throws on one that
// cannot be dropped.
Forecast simulate(const RecordedStep& step, const std::vector<bool>& dropped);

// All outputs of an operator that can be dropped are dropped together. Exact for few candidates
// (PlanOptions); else the knapsack of bytes and seconds, which is exact where values are of few
// kinds and replays share neither work nor memory, improved by simulation. The forecast's peak is
// never over the budget; where keeping everything fits, nothing is dropped. A refusal names the
// least peak that was reached: that budget is accepted, and one a little below it may be.
RecomputePlan plan_recompute(const RecordedStep& step, int64_t budget_bytes,
                             const PlanOptions& options = {});

}  // namespace zeropage::checkpointing

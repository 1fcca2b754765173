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
#include <limits>
#include <string>
#include <vector>

namespace zeropage::checkpointing {

// A dropped value stays allocated for so many ticks past its save: the user's handles of it, the
// variables of forward(), die soon after but not at once.
inline constexpr size_t kLingerTicks = 2;

// The producer of a parameter, an input of the batch: it is always there, at no charge.
inline constexpr size_t kLeaf = std::numeric_limits<size_t>::max();

struct RecordedOperator {
  std::string signature;       // equal for equal work: measured seconds are averaged over it
  double seconds = 0;          // measured
  std::vector<size_t> inputs;  // values
  bool replayable = true;      // false: its outputs are not what running it again would give
};

enum class Retention {
  kPassing,  // autograd does not save it: gone after forward
  kSaved,    // saved for backward; a candidate where its operator can be replayed
  kHeld,     // saved for backward and kept in any case
};

struct RecordedValue {
  int64_t bytes = 0;
  size_t producer = kLeaf;  // an operator
  Retention retention = Retention::kPassing;
};

enum class Event {
  kSave,     // forward has made the value, and it will be saved
  kNeed,     // backward is about to use it
  kRelease,  // backward will not use it again
};

struct Tick {
  Event event = Event::kSave;
  size_t value = 0;
  // The peak since the tick before, both ends counted, of all activation bytes that are not saved
  // values: temporaries, gradients of activations.
  int64_t other_bytes = 0;
};

// One measured step. Operators in the order in which forward ran them; ticks in the order of
// forward and backward. A value has one save; it is alive until its last release.
struct RecordedStep {
  std::vector<RecordedOperator> operators;
  std::vector<RecordedValue> values;
  std::vector<Tick> ticks;
};

struct Forecast {
  int64_t peak_bytes = 0;
  size_t peak_tick = 0;       // the peak is in the time that ends with this tick, or in its replay
  double replay_seconds = 0;  // in addition to the step
  std::vector<size_t> replays;  // [operators]: how often each runs again
};

struct RecomputePlan {
  std::vector<bool> dropped;  // [values]
  Forecast forecast;
  size_t simulations = 0;  // that the search took
};

struct PlanOptions {
  // With so many candidates or fewer, in a short step, every set of them is tried: at most 2^n
  // simulations. 0: never.
  size_t exhaustive_items = 14;
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

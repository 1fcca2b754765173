// One measured step, as plans of what to recompute are made of it, and what such a plan may be asked for.
// Units: bytes, seconds; values, operators and ticks are indices into RecordedStep.
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

struct PlanOptions {
  // With so many candidates or fewer, in a short step, every set of them is tried: at most 2^n
  // simulations. 0: never.
  size_t exhaustive_items = 14;
};

}  // namespace zeropage::checkpointing

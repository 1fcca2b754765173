// A recorded step as a graph: which operators make and read a value, when it is saved and needed, and
// whether it can be dropped and computed again. Private to checkpointing/.
//
// Lifetime: keeps a reference to the step. Threads: constant after construction.
// Throws: c10::Error on a step that contradicts itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "checkpointing/recorded_step.h"

namespace zeropage::checkpointing::detail {

// No tick, no replay, no operator.
inline constexpr size_t kNone = std::numeric_limits<size_t>::max();

class StepGraph {
 public:
  struct Need {
    size_t tick = 0;
    size_t value = 0;
  };

  explicit StepGraph(const RecordedStep& step);

  const RecordedStep& step() const { return step_; }

  // What an operator reads and makes, each value once.
  const std::vector<size_t>& inputs(size_t op) const { return inputs_[op]; }
  const std::vector<size_t>& outputs(size_t op) const { return outputs_[op]; }
  int64_t output_bytes(size_t op) const { return output_bytes_[op]; }
  // Averaged over the signature.
  double seconds(size_t op) const { return seconds_[op]; }
  // What replaying the operator costs while all that is saved is kept: with its passing inputs; 0
  // where backward needs none of its outputs.
  double lone_seconds(size_t op) const;

  // Questions about a value.
  bool saved(size_t value) const { return step_.values[value].retention != Retention::kPassing; }
  bool droppable(size_t value) const { return droppable_[value] != 0; }
  size_t save_tick(size_t value) const { return save_tick_[value]; }
  // The tick of its last release; without one, the last tick of the step.
  size_t last_tick(size_t value) const { return last_tick_[value]; }
  const std::vector<size_t>& last_ticks() const { return last_tick_; }

  // When backward first needs each droppable value, in order.
  const std::vector<Need>& first_needs() const { return first_needs_; }

 private:
  void average_seconds();
  void index_ticks();
  void find_droppable();

  const RecordedStep& step_;
  std::vector<std::vector<size_t>> inputs_;   // [operators]
  std::vector<std::vector<size_t>> outputs_;  // [operators]
  std::vector<int64_t> output_bytes_;         // [operators]
  std::vector<double> seconds_;               // [operators]
  std::vector<uint8_t> needed_;               // [operators]: backward uses a droppable output
  std::vector<uint8_t> droppable_;            // [values]
  std::vector<size_t> save_tick_;             // [values]
  std::vector<size_t> last_tick_;             // [values]
  std::vector<Need> first_needs_;
};

}  // namespace zeropage::checkpointing::detail

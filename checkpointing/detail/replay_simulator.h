// Runs through a recorded step as if some of its values were dropped: private to checkpointing/.
//
// Lifetime: keeps a reference to the step. Threads: one at a time; run() reuses scratch memory, so
// that a search may call it hundreds of times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "checkpointing/recorded_step.h"

namespace zeropage::checkpointing::detail {

struct Outcome {
  int64_t peak_bytes = 0;
  size_t peak_tick = 0;
  double replay_seconds = 0;
};

class ReplaySimulator {
 public:
  using Decision = std::vector<uint8_t>;  // [values], 1: dropped

  // Throws c10::Error on a step that contradicts itself.
  explicit ReplaySimulator(const RecordedStep& step);

  Outcome run(const Decision& dropped);
  // [operators]: how often each was replayed in the last run.
  std::vector<size_t> replays() const;

  // Whether it can be dropped and computed again.
  bool droppable(size_t value) const { return droppable_[value] != 0; }
  // What replaying the operator costs while all that is saved is kept: with its passing inputs; 0
  // where backward needs none of its outputs.
  double lone_seconds(size_t op) const;
  bool saved(size_t value) const { return step_.values[value].retention != Retention::kPassing; }
  const RecordedStep& step() const { return step_; }
  const std::vector<size_t>& inputs(size_t op) const { return inputs_[op]; }
  const std::vector<size_t>& outputs(size_t op) const { return outputs_[op]; }
  size_t runs() const { return runs_; }

 private:
  // One need of a value that is not there, and the operators that bring it, in order_.
  struct Replay {
    size_t tick = 0;
    size_t begin = 0;
    size_t end = 0;
  };
  struct Need {
    size_t tick = 0;
    size_t value = 0;
  };

  void check_step() const;
  void check_tick(size_t tick, const std::vector<size_t>& saves) const;
  void average_seconds();
  void index_ticks();
  void find_droppable();
  void schedule(const Decision& dropped);
  void collect(size_t op, const Decision& dropped, size_t replay);
  void lay_out_lifetimes(const Decision& dropped);
  void add_lifetime(size_t first_tick, size_t last_tick, int64_t bytes);
  int64_t replay_peak(const Replay& replay, size_t number);

  // Constant after construction.
  const RecordedStep& step_;
  std::vector<std::vector<size_t>> inputs_;   // [operators], each value once
  std::vector<std::vector<size_t>> outputs_;  // [operators]
  std::vector<int64_t> output_bytes_;         // [operators]
  std::vector<double> seconds_;               // [operators], averaged over the signature
  std::vector<uint8_t> droppable_;            // [values]
  std::vector<size_t> save_tick_;             // [values]
  std::vector<size_t> last_tick_;             // [values]: the last release
  std::vector<Need> first_needs_;             // of droppable values, in order
  std::vector<uint8_t> needed_;               // [operators]: backward uses a droppable output
  std::vector<size_t> saved_values_;

  // Of the last run.
  std::vector<Replay> replays_;
  std::vector<size_t> order_;        // operators, replay after replay
  std::vector<size_t> alive_until_;  // [values]: tick
  std::vector<size_t> brought_by_;   // [values]: replay, kNone
  std::vector<size_t> visited_by_;   // [operators]: replay, kNone
  std::vector<size_t> last_reader_;  // [values]: operator within one replay, kNone
  std::vector<size_t> stack_;
  std::vector<int64_t> change_;  // [ticks + 1]: of live bytes, before the tick
  size_t runs_ = 0;
};

}  // namespace zeropage::checkpointing::detail

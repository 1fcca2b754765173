// What a step would take, in bytes and in seconds, if some of its values were dropped. Private to
// checkpointing/.
//
// Lifetime: keeps a reference to the graph. Threads: one at a time; run() reuses its memory, so that
// a search may call it hundreds of times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "checkpointing/detail/replay_schedule.h"
#include "checkpointing/detail/step_graph.h"

namespace zeropage::checkpointing::detail {

struct Outcome {
  int64_t peak_bytes = 0;
  size_t peak_tick = 0;
  double replay_seconds = 0;
};

class ReplaySimulator {
 public:
  explicit ReplaySimulator(const StepGraph& graph);

  Outcome run(const Decision& dropped);
  // [operators]: how often each was replayed in the last run.
  std::vector<size_t> replays() const;
  // How many there were so far.
  size_t runs() const { return runs_; }

 private:
  void lay_out_lifetimes(const Decision& dropped);
  void add_lifetime(size_t first_tick, size_t last_tick, int64_t bytes);
  int64_t replay_peak(const Replay& replay, size_t number);

  const StepGraph& graph_;
  ReplaySchedule schedule_;
  std::vector<size_t> last_reader_;  // [values]: operator within one replay, kNone
  std::vector<int64_t> change_;      // [ticks + 1]: of live bytes, before the tick
  size_t runs_ = 0;
};

}  // namespace zeropage::checkpointing::detail

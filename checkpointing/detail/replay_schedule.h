// Which operators run again, and when, where some values of a step are dropped: it depends on what is
// there, not on bytes. Private to checkpointing/.
//
// Lifetime: keeps a reference to the graph. Threads: one at a time; lay_out() reuses its memory, so
// that a search may call it hundreds of times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "checkpointing/detail/step_graph.h"

namespace zeropage::checkpointing::detail {

// [values], 1: dropped.
using Decision = std::vector<uint8_t>;

// One need of a value that is not there, and the operators that bring it: [begin, end) of
// ReplaySchedule::operators().
struct Replay {
  size_t tick = 0;
  size_t begin = 0;
  size_t end = 0;
};

class ReplaySchedule {
 public:
  explicit ReplaySchedule(const StepGraph& graph);

  void lay_out(const Decision& dropped);

  // These are results of the last decision.

  const std::vector<Replay>& replays() const { return replays_; }
  // Replay after replay, in each in the order of the step.
  const std::vector<size_t>& operators() const { return operators_; }
  // The tick until which the value is used, by backward or by a replay.
  size_t alive_until(size_t value) const { return alive_until_[value]; }
  // Which replay brings the value; kNone: it is kept, or never needed.
  size_t brought_by(size_t value) const { return brought_by_[value]; }

 private:
  void collect(size_t op, const Decision& dropped, size_t replay);

  const StepGraph& graph_;
  std::vector<Replay> replays_;
  std::vector<size_t> operators_;
  std::vector<size_t> alive_until_;  // [values]: tick
  std::vector<size_t> brought_by_;   // [values]: replay
  std::vector<size_t> visited_by_;   // [operators]: replay
  std::vector<size_t> stack_;        // of collect()
};

}  // namespace zeropage::checkpointing::detail

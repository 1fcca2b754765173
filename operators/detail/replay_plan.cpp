#include "operators/detail/replay_plan.h"

#include <algorithm>

namespace zeropage::operators::detail {
namespace {

// Walks the tape from its end and knows what is still needed behind the operator that it looks at.
class Planner {
 public:
  Planner(const Tape& tape, const std::vector<size_t>& targets, const std::vector<size_t>& states)
      : tape_(tape),
        needed_(tape.storages.size(), false),
        open_(tape.storages.size(), false),
        needed_states_(tape.random.states.size(), false) {
    for (const size_t storage : targets) needed_[storage] = open_[storage] = true;
    for (const size_t state : states) needed_states_[state] = true;
  }

  bool is_live(const RecordedOperator& recorded) const {
    const auto is_needed = [&](size_t storage) { return needed_[storage]; };
    return std::any_of(recorded.writes.begin(), recorded.writes.end(), is_needed) ||
           std::any_of(recorded.makes.begin(), recorded.makes.end(), is_needed) ||
           (recorded.draw && needed_states_[recorded.draw->after]);
  }

  ReplayStep step(size_t index) {
    const RecordedOperator& recorded = tape_.operators[index];
    ReplayStep step{.operator_index = index};
    std::vector<size_t> touched;
    for (const auto* storages : {&recorded.reads, &recorded.writes, &recorded.makes}) {
      for (const size_t storage : *storages) insert(touched, storage);
    }
    for (const size_t storage : touched) {
      if (tape_.storages[storage].captured.defined()) continue;
      if (open_[storage]) {
        step.hand_over.push_back(storage);
        open_[storage] = false;
      } else if (!needed_[storage]) {
        step.release.push_back(storage);
      }
    }
    for (const size_t storage : recorded.overwrites) needed_[storage] = false;
    for (const size_t storage : recorded.makes) needed_[storage] = false;
    for (const size_t storage : recorded.reads) needed_[storage] = true;
    if (recorded.draw) {
      step.last_use_of_state = !needed_states_[recorded.draw->before];
      needed_states_[recorded.draw->before] = true;
    }
    return step;
  }

 private:
  const Tape& tape_;
  std::vector<bool> needed_;  // storages whose values an operator behind reads, or a target
  std::vector<bool> open_;    // targets that no operator behind touches
  std::vector<bool> needed_states_;
};

}  // namespace

std::vector<ReplayStep> plan_replay(const Tape& tape, const std::vector<size_t>& targets,
                                    const std::vector<size_t>& states) {
  Planner planner(tape, targets, states);
  std::vector<ReplayStep> steps;
  for (size_t index = tape.operators.size(); index-- > 0;) {
    if (planner.is_live(tape.operators[index])) steps.push_back(planner.step(index));
  }
  std::reverse(steps.begin(), steps.end());
  return steps;
}

}  // namespace zeropage::operators::detail

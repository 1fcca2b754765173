#include "checkpointing/detail/replay_schedule.h"

#include <algorithm>

namespace zeropage::checkpointing::detail {

ReplaySchedule::ReplaySchedule(const StepGraph& graph)
    : graph_(graph), visited_by_(graph.step().operators.size()) {}

void ReplaySchedule::lay_out(const Decision& dropped) {
  replays_.clear();
  operators_.clear();
  alive_until_ = graph_.last_ticks();
  brought_by_.assign(graph_.step().values.size(), kNone);
  std::fill(visited_by_.begin(), visited_by_.end(), kNone);
  for (const auto& [tick, value] : graph_.first_needs()) {
    if (dropped[value] == 0 || brought_by_[value] != kNone) continue;
    const size_t number = replays_.size();
    const size_t begin = operators_.size();
    collect(graph_.step().values[value].producer, dropped, number);
    std::sort(operators_.begin() + static_cast<std::ptrdiff_t>(begin), operators_.end());
    for (size_t at = begin; at < operators_.size(); ++at) {
      for (const size_t output : graph_.outputs(operators_[at])) {
        if (dropped[output] != 0 && brought_by_[output] == kNone) brought_by_[output] = number;
      }
      for (const size_t input : graph_.inputs(operators_[at])) {
        alive_until_[input] = std::max(alive_until_[input], tick);
      }
    }
    replays_.push_back({tick, begin, operators_.size()});
  }
}

void ReplaySchedule::collect(size_t op, const Decision& dropped, size_t replay) {
  stack_.assign(1, op);
  visited_by_[op] = replay;
  while (!stack_.empty()) {
    const size_t each = stack_.back();
    stack_.pop_back();
    operators_.push_back(each);
    for (const size_t input : graph_.inputs(each)) {
      const size_t producer = graph_.step().values[input].producer;
      if (producer == kLeaf || visited_by_[producer] == replay) continue;
      const bool at_hand =
          graph_.saved(input) && (dropped[input] == 0 || brought_by_[input] != kNone);
      if (at_hand) continue;
      visited_by_[producer] = replay;
      stack_.push_back(producer);
    }
  }
}

}  // namespace zeropage::checkpointing::detail

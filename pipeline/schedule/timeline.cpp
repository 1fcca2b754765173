#include <algorithm>

#include "zeropage/schedule.h"

namespace zeropage::parallel {

double makespan_s(const Timeline& timeline) {
  double end = 0;
  for (const auto& actions : timeline) {
    for (const TimedAction& timed : actions) end = std::max(end, timed.end_s);
  }
  return end;
}

double bubble_fraction(const Timeline& timeline) {
  const double whole = makespan_s(timeline) * static_cast<double>(timeline.size());
  double busy = 0;
  for (const auto& actions : timeline) {
    for (const TimedAction& timed : actions) busy += timed.end_s - timed.begin_s;
  }
  return whole > 0 ? 1 - busy / whole : 0;
}

std::vector<std::map<ActionKind, double>> mean_seconds(const Timeline& timeline) {
  std::vector<std::map<ActionKind, double>> means;
  for (const auto& actions : timeline) {
    std::map<ActionKind, int> counts;
    auto& of_rank = means.emplace_back();
    for (const TimedAction& timed : actions) {
      of_rank[timed.action.kind] += timed.end_s - timed.begin_s;
      ++counts[timed.action.kind];
    }
    for (auto& [kind, seconds] : of_rank) seconds /= counts[kind];
  }
  return means;
}

std::vector<double> peak_activations(const ActionLists& lists) {
  std::vector<double> peaks;
  for (const auto& actions : lists.of_rank) {
    int held = 0;
    int most = 0;
    for (const Action& action : actions) {
      if (action.kind == ActionKind::kForward) most = std::max(most, ++held);
      if (action.kind == ActionKind::kBackward || action.kind == ActionKind::kWeightGradient) {
        --held;
      }
    }
    peaks.push_back(static_cast<double>(most) / lists.chunks);
  }
  return peaks;
}

}  // namespace zeropage::parallel

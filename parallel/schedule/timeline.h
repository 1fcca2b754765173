// When the ranks of a pipeline did what: simulated, or measured in a run.
#pragma once

#include <map>
#include <vector>

#include "parallel/schedule/action.h"

namespace zeropage::parallel {

struct TimedAction {
  Action action;
  double begin_s = 0;  // since the step began
  double end_s = 0;

  friend bool operator==(const TimedAction&, const TimedAction&) = default;
};

using Timeline = std::vector<std::vector<TimedAction>>;  // [ranks][actions], in order

// From 0 to the end of the last action.
double makespan_s(const Timeline& timeline);

// The part of the ranks' time until then in which they do nothing: 0 to 1. Zero for a step without actions.
double bubble_fraction(const Timeline& timeline);

// What an action of each kind takes on each rank, on average, [ranks].
std::vector<std::map<ActionKind, double>> mean_seconds(const Timeline& timeline);

// The most activations that each rank holds at once, [ranks], in micro-batches: what a chunk holds of one counts 1 / chunks. They are
// held from a forward to the end of its backward, or of its weight gradient. The order alone decides.
std::vector<double> peak_activations(const ActionLists& lists);

}  // namespace zeropage::parallel

// How long a step of a pipeline takes, before it runs.
#pragma once

#include <functional>
#include <vector>

#include "zeropage/schedule.h"

namespace zeropage::pipeline {

// How long a stage computes, in seconds. A backward takes both gradients' time.
struct StageSeconds {
  double forward = 0;
  double input_gradient = 0;
  double weight_gradient = 0;

  double of(parallel::ActionKind kind) const;
};

struct SimulatedStep {
  parallel::Timeline timeline;
  double makespan_s = 0;
  double bubble = 0;                     // bubble_fraction(timeline)
  std::vector<double> peak_activations;  // [ranks], in micro-batches
};

// Each rank does its actions in order. An action begins when the one before it has ended and its message is there. A message takes
// `transfer_s` and does not delay the sender; between two ranks those of one direction follow each other. What stays on a rank
// takes no time. Throws what check_order throws, and for a duration that is negative or not finite.
//
// seconds_of: what an action takes on that rank; a run's measured time, for example.
SimulatedStep simulate(
    const parallel::ActionLists& lists,
    const std::function<double(int rank, const parallel::Action& action)>& seconds_of,
    double transfer_s = 0);

// stages: of each stage [ranks x chunks], or one for all.
SimulatedStep simulate(const parallel::ActionLists& lists, const std::vector<StageSeconds>& stages,
                       double transfer_s = 0);

}  // namespace zeropage::pipeline

// A step's timeline as JSON: what a run writes of its actions, and `zp schedule --times` reads.
//
//   {"schedule": "1f1b", "chunks": 1,
//    "ranks": [[{"kind": "forward", "chunk": 0, "micro_batch": 0, "begin_s": 0.001, "end_s": 0.004}, ...], ...]}
//
// One list for each rank of the pipeline, in the order of its actions; kinds are name(ActionKind). All ranks' seconds are since one moment.
#pragma once

#include <string>

#include "parallel/schedule/timeline.h"

namespace zeropage::parallel {

struct TimedStep {
  std::string schedule;  // its name
  int chunks = 1;        // of each rank
  Timeline timeline;
};

std::string to_json(const TimedStep& step);

// Throws std::invalid_argument with what was expected and the place, if the text is something else. who: the file, for the error.
TimedStep timed_step(const std::string& json, const std::string& who);

// Throws std::invalid_argument unless the step did these actions in this order, one after the other on each rank.
void check_times(const TimedStep& step, const ActionLists& lists, const std::string& who);

}  // namespace zeropage::parallel

// Which operators of a tape a replay runs, and when each storage and each state of a generator has
// been used for the last time.
//
// Lifetime, threads: plain values.
// Throws nothing of its own.
#pragma once

#include <vector>

#include "operators/detail/recorded_operator.h"

namespace zeropage::operators::detail {

struct ReplayStep {
  size_t operator_index;
  std::vector<size_t> hand_over;   // storages of targets that are complete
  std::vector<size_t> release;     // other storages that nobody reads any more
  bool last_use_of_state = false;  // of the one that its draw begins with
};

// targets: storages. states: of generators, that must be known at the end.
std::vector<ReplayStep> plan_replay(const Tape& tape, const std::vector<size_t>& targets,
                                    const std::vector<size_t>& states);

}  // namespace zeropage::operators::detail

// The measurements with one number of ranks.
#pragma once

#include <ostream>
#include <vector>

#include "bench/collectives/figures.h"
#include "bench/collectives/flags.h"
#include "bench/collectives/team.h"

namespace collectives {

struct Run {
  int ranks = 0;
  std::vector<Absent> absent;
  std::vector<Measurement> measurements;
};

// Starts the ranks, measures, and prints to `table` as figures come. Call it while the process has
// one thread. Throws if a rank failed, which has then said why on stderr.
Run run(int ranks, const Flags& flags, std::ostream& table);

}  // namespace collectives

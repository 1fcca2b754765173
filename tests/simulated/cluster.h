// One run on a simulated cluster: ranks are threads, and a launcher of the library's rules starts them again.
//
// What a launcher decides is comm/launcher/rank_restarts.h, what a rank does is saving/detail/surviving_loop.h. Only processes, the
// store's server and the messages between them are simulated here.
// Threads: any number of runs at the same time.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tests/simulated/ending.h"
#include "tests/simulated/run_plan.h"

namespace zeropage::simulated {

struct Outcome {
  // By rank: what it ended with, or its last error; a process that was killed has neither.
  struct OfRank {
    std::optional<Ending> ending;
    std::string error;
    bool was_killed = false;
  };
  std::vector<OfRank> ranks;
  std::vector<bool> happened;       // by fault of the plan
  int generations = 0;              // behind the first one
  std::vector<std::string> begins;  // why they began
  int64_t lost_steps = 0;
  // Ranks that have not ended in time. Their threads are left behind, so the process cannot go on.
  std::vector<int> hung;
  double seconds = 0;
};

Outcome run_on_cluster(const RunPlan& plan);

// Sends what the ranks write to the disk past their scenarios. Once, before the first run.
void simulate_disks();

}  // namespace zeropage::simulated

// One trial: ranks work, one is killed by SIGKILL from outside at a random moment, and what the
// others do is judged.
//
// Threads: forks, so the process must have no other thread.
// Units: milliseconds, from the kill.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zeropage/world.h"

namespace zeropage {

struct KillPlan {
  comm::Transport transport = comm::Transport::kGloo;
  int ranks = 2;
  uint64_t seed = 1;          // draws the victim, the moment and the work
  bool only_working = false;  // not while the ranks meet
};

struct KillResult {
  // Whether some rank had no world yet when the kill came.
  bool meeting = false;
  std::vector<double> latencies;    // of each survivor, until it had its error
  double all_gone = 0;              // until the launcher had returned
  std::vector<std::string> faults;  // empty: clean
  std::string description;          // what was killed when
  std::string output;               // of the ranks
};

// A survivor must have its error within this time of the kill.
inline constexpr double kErrorLimit = 2000;
// The deadline of worlds that lose a rank while they meet, and how late an error may be then: rank 0
// keeps its verdict for the others for up to 5 s.
inline constexpr int kMeetingDeadline = 3000;
inline constexpr double kMeetingLimit = kMeetingDeadline + 7000;

KillResult run_kill_trial(const KillPlan& plan);

}  // namespace zeropage

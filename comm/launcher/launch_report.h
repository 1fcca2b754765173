// What a launcher says on stderr when something went wrong. Pure text: no process, no output.
//
// Lifetime, threads: plain functions.
// Throws: nothing but std::bad_alloc.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "comm/launcher/rank_output.h"
#include "comm/launcher/rank_process.h"
#include "zeropage/launcher.h"

namespace zeropage::comm::detail {

struct FailedRank {
  int rank = 0;
  pid_t pid = 0;
  RankEnd end;
  RankStart::Streams streams = RankStart::Streams::kPiped;
};

// "zeropage: rank 1 (pid 1234) was killed by SIGKILL", and its last lines.
std::string failure_report(const FailedRank& failed, const RankOutput& output,
                           const LaunchOptions& options);

// "rank 3", "ranks 0, 1, 2"; long lists are cut.
std::string name_ranks(const std::vector<int>& ranks);

// "5 s", "0.2 s".
std::string name_duration(std::chrono::milliseconds time);

}  // namespace zeropage::comm::detail

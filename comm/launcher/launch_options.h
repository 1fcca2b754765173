// What a launch of local ranks may be asked for (comm/launcher/launcher.h).
// Units: milliseconds, lines.
#pragma once

#include <chrono>
#include <cstddef>

namespace zeropage::comm {

struct LaunchOptions {
  enum class Output {
    // Every line of every rank comes out as "[rank 1] line". A piece that ends in '\r' counts as a
    // line.
    kPrefixAll,
    // Rank 0 keeps our stdout and stderr untouched, so that it can draw on a terminal. Its last
    // lines are then unknown to the report.
    kRankZeroBare,
  };

  // Processes to start, 1 to 4096. Each costs two file descriptors here.
  int ranks = 1;

  Output output = Output::kPrefixAll;

  // How long the others may take to end by themselves after a rank failed, or after a signal was
  // passed on to them. Ranks usually notice a dead peer and name it, which is worth waiting for.
  std::chrono::milliseconds grace{5000};

  // Lines of each rank (stdout and stderr together) that are kept for the report.
  std::size_t tail_lines = 20;
};

}  // namespace zeropage::comm

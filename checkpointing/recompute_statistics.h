// What checkpointed regions and recomputed operators cost.
#pragma once

#include <cstdint>
#include <string>

namespace zeropage::checkpointing {

struct RecomputeStatistics {
  int64_t forwards = 0;          // of regions, or of scopes that recompute operators
  int64_t replays = 0;           // forwards, or operators, repeated in backward
  double forward_flops = 0;      // of those forwards: matrix products, convolutions and attention
  double recomputed_flops = 0;   // of the replays
  double recompute_seconds = 0;  // on the host; work that was enqueued to a device may take longer
};
// One line.
std::string to_string(const RecomputeStatistics& statistics);

// Since the thread began: of regions and scopes that it ran forward, whichever thread repeats them.
RecomputeStatistics recompute_statistics();

}  // namespace zeropage::checkpointing

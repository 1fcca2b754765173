// What a plan is asked for and what it tries (planning/plan.h). Values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "memory/ledger.h"
#include "zero/options.h"

namespace zeropage {

// What a run gets. Bytes; 0: not known, and nothing is refused for it.
struct WorldDescription {
  int ranks = 1;           // 1 to comm::kMostSimulatedRanks
  int ranks_per_host = 8;  // at most; the last host may have fewer
  // Of a rank's device, as far as LibTorch may use it.
  int64_t device_memory_bytes = 0;
  // Of a host, for all of its ranks.
  int64_t host_memory_bytes = 0;
  int64_t nvme_bytes = 0;

  // What a rank may have of the tier.
  int64_t bytes_of_rank(memory::Tier tier) const;
};

// What of a forward is computed again in backward.
enum class CheckpointPolicy : uint8_t {
  kNone,
  kSelective,  // cheap operators (checkpointing/recompute.h)
  kBlocks,     // each block
};
// "none", "selective", "blocks".
std::string_view name(CheckpointPolicy policy);

// One way to train the model.
struct PlannedSetting {
  Stage stage;
  memory::Tier optimizer = memory::Tier::kDevice;   // OffloadOptions::optimizer
  memory::Tier parameters = memory::Tier::kDevice;  // OffloadOptions::parameters
  CheckpointPolicy checkpointing = CheckpointPolicy::kNone;
};
// "stage 2, optimizer on host, checkpoint blocks".
std::string to_string(const PlannedSetting& setting);

}  // namespace zeropage

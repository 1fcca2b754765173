// What a plan is asked for and what it tries (planning/plan.h). Values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "device/product_workspaces.h"
#include "memory/ledger.h"
#include "zero/options.h"

namespace zeropage {

// In which segments the allocator of a device has its memory (memory/expandable_segments.h).
enum class AllocatorSegments : uint8_t {
  kExpandable,  // LibTorch's CUDA allocator, with expandable_segments:True
  kFixed,       // and with expandable_segments:False
  kNone,        // each tensor by itself, as on a host
};
// "expandable", "fixed", "none".
std::string_view name(AllocatorSegments segments);

// What is taken of a device besides what tensors ask for.
struct DeviceAllocator {
  AllocatorSegments segments = AllocatorSegments::kExpandable;
  memory::ProductWorkspaces workspaces;  // unset: not known, and none are counted
};

// What a run gets. Bytes; 0: not known, and nothing is refused for it.
struct WorldDescription {
  int ranks = 1;           // 1 to comm::kMostSimulatedRanks
  int ranks_per_host = 8;  // at most; the last host may have fewer
  // The memory of a rank's device, as far as LibTorch's allocator may reserve it.
  int64_t device_memory_bytes = 0;
  // Memory of a host, for all of its ranks.
  int64_t host_memory_bytes = 0;
  int64_t nvme_bytes = 0;
  // Ranks train in the memory of their host: what is on the device counts there too.
  bool device_is_host = false;
  // The allocator of a device that is not the host.
  DeviceAllocator allocator;

  // Whether there is an allocator between tensors and the device's memory.
  bool has_allocator() const {
    return !device_is_host && allocator.segments != AllocatorSegments::kNone;
  }
  // What a rank may have of the tier.
  int64_t bytes_of_rank(memory::Tier tier) const;
};

// Which activations are computed again in backward.
enum class CheckpointPolicy : uint8_t {
  kNone,
  kSelective,  // cheap operators (checkpointing/recompute.h)
  kBlocks,     // each block
};
// "none", "selective", "blocks".
std::string_view name(CheckpointPolicy policy);

// How pages come and go. The bits do not depend on it.
struct PagingSetting {
  int64_t page_bytes = Options::kPageBytesOfDevice;  // unset: of the training's options
  int64_t prefetch_bytes =
      Options::kTwoLargestPages;      // where the stage shards parameters; unset: likewise
  StepWhen step = StepWhen::kInStep;  // where the optimizer has left the device

  bool operator==(const PagingSetting&) const = default;
};

// One way to train the model.
struct PlannedSetting {
  Stage stage;
  memory::Tier optimizer = memory::Tier::kDevice;   // OffloadOptions::optimizer
  memory::Tier parameters = memory::Tier::kDevice;  // OffloadOptions::parameters
  CheckpointPolicy checkpointing = CheckpointPolicy::kNone;
  // Which of PlanOptions::paging it has, in their order.
  size_t paging_index = 0;
  PagingSetting paging;
};
// "stage 2, optimizer on host, checkpoint blocks".
std::string to_string(const PlannedSetting& setting);

// The options of a training with that setting. training: all that settings have in common; what it says of
// sharded parameters goes where the stage shards none. A folder on NVMe is not filled in.
Options options_of(const Options& training, const PlannedSetting& setting);

}  // namespace zeropage

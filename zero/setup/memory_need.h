// What a rank will hold, known before it is allocated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/world.h"
#include "device/host_memory.h"
#include "memory/ledger.h"
#include "zero/layout/shard_layout.h"
#include "zero/options.h"
#include "zero/tiers/page_offload.h"

namespace zeropage {

struct MemoryNeed {
  memory::Breakdown persistent;  // on the device
  memory::Breakdown host;        // offloaded to the host
  // While a step runs: two largest pages (or the budget), and a bucket. Activations come on top.
  int64_t transient_bytes = 0;
};

// Of pages, their gradients and master weights; padding included. page_offload: null where all stays
// on the device.
MemoryNeed need_of_pages(const std::vector<PageLayout>& layouts, const Options& options,
                         int world_size, const PageOffload* page_offload = nullptr);

// Throws, on all ranks alike, if a rank's accelerator has less: with the figures as a table. Ranks that
// share an accelerator have equal parts of what is free on it. what: "the model". held_bytes: of the need, on the device already. Nothing on the host. Collective.
void check_device_holds(const comm::World& world, const std::string& what, const MemoryNeed& need,
                        int64_t held_bytes);

// The same for what is offloaded to the host: bytes a rank, against what `host` says may be taken.
// what: "the offloaded optimizer state". Collective.
void check_host_holds(const comm::World& world, const std::string& what, int64_t bytes,
                      const memory::HostMemory& host);

}  // namespace zeropage

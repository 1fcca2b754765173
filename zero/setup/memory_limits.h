// The limits of memory that options set (Options::device_memory_bytes, host_memory_bytes), as one rank has
// them: what is refused before anything is moved, what stops an allocation, and what is advised then.
#pragma once

#include <memory>
#include <string>

#include "memory/memory_limit.h"
#include "zero/plan/byte_plan.h"
#include "zeropage/options.h"
#include "zeropage/world.h"

namespace zeropage {

// Limits of a rank; of the host's memory it gets an equal part.
memory::MemoryLimits limits_of(const comm::World& world, const Options& options);

// Throws, on all ranks alike, if what a rank is about to hold passes a limit: by how much, and with the
// figures as a table. what: "the model". need: from step to step. transient_bytes: on the device, while a step
// runs. Collective where there is a limit.
void check_limits_hold(const comm::World& world, const Options& options, const std::string& what,
                       const memory::TierBytes& need, int64_t transient_bytes);

// From here on no allocation of the calling thread's ledger passes a limit, and who runs out of memory is told
// the cheapest changes that would have fitted. layouts: of the model's pages.
std::unique_ptr<memory::MemoryLimitScope> limit_memory(const comm::World& world,
                                                       const Options& options,
                                                       const std::vector<PageLayout>& layouts,
                                                       int shard_rank, int shard_ranks);

// The changes of options, the cheapest first, that would have left room, in lines; "" where none of them would. A
// line also for activations, where computing them again would do.
std::string cheapest_changes(const Options& options, const std::vector<PageLayout>& layouts,
                             int rank, int ranks, bool device_is_host,
                             const memory::MemoryShortage& shortage);

}  // namespace zeropage

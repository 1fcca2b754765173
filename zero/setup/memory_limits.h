// The limits of memory that options set (Options::device_memory_bytes, host_memory_bytes), as one rank has
// them: what is refused before anything is moved, what stops an allocation, and what is advised then.
#pragma once

#include <memory>
#include <string>

#include "memory/memory_limit.h"
#include "zero/plan/byte_plan.h"
#include "zero/setup/memory_advice.h"
#include "zero/setup/step_facts.h"
#include "zeropage/options.h"
#include "zeropage/world.h"

namespace zeropage::zero {

// Limits of a rank; of the host's memory it gets an equal part.
memory::MemoryLimits limits_of(const comm::World& world, const Options& options);

// Throws, on all ranks alike, if what a rank is about to hold passes a limit: by how much, and with the
// figures as a table. what: "the model". need: from step to step. transient_bytes: on the device, while a step
// runs. Collective where there is a limit.
void check_limits_hold(const comm::World& world, const Options& options, const std::string& what,
                       const memory::TierBytes& need, int64_t transient_bytes);

// From here on no allocation of the calling thread's ledger passes a limit, and who runs out of memory is told
// what makes the step fit. model: its options, layouts, ranks and whether it is wrapped. held_bytes: of its parameters, on
// the device already.
std::shared_ptr<memory::MemoryLimitScope> limit_memory(const comm::World& world, LimitedModel model,
                                                       std::shared_ptr<StepFacts> facts,
                                                       int64_t held_bytes);

}  // namespace zeropage::zero

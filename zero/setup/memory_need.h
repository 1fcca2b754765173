// Whether a device and its host have the memory that the byte plan asks for (zero/plan/byte_plan.h).
#pragma once

#include <cstdint>
#include <string>

#include "device/host_memory.h"
#include "zeropage/ledger.h"
#include "zeropage/world.h"

namespace zeropage::zero {

// On the device of a rank.
struct MemoryNeed {
  memory::Breakdown persistent;
  int64_t transient_bytes = 0;  // while a step runs; activations come on top
  int64_t held_bytes = 0;       // of both, already
};

// Throws, on all ranks alike, if a rank's accelerator has less: with the figures as a table. Ranks that
// share an accelerator have equal parts of what is free on it. what: "the model". Does nothing on the
// host. Collective.
void check_device_holds(const comm::World& world, const std::string& what, const MemoryNeed& need);

// The same for what is offloaded to the host: bytes a rank, against what `host` says may be taken.
// what: "the offloaded optimizer state". Collective.
void check_host_holds(const comm::World& world, const std::string& what, int64_t bytes,
                      const device::HostMemory& host);

// Throws on all ranks if one of them has an error. own: of this rank; "" for none. Collective.
void throw_alike(const comm::World& world, const char* about, const std::string& own);

}  // namespace zeropage::zero

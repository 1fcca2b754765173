// --device-memory and --host-memory: the setting that keeps below them, chosen before the first step
// (zeropage/fit.h). What the command line says itself stays as it says.
#pragma once

#include <string>

#include "bench/train_gpt/flags.h"
#include "zeropage/plan.h"
#include "zeropage/zeropage.h"

namespace train_gpt {

// What a simulated run on CUDA takes of a device besides tensors: as LibTorch does by our default, on sm_90.
zeropage::DeviceAllocator allocator_of_simulated_cuda();

// Puts the choice into the flags. Returns what it is, in a line; "" where no limit is given, or --memory-rungs finds out what fits.
// Collective.
std::string fit_to_limits(const zeropage::World& world, Flags& flags);

// --memory-rungs: what a step does on a rung (zeropage/survive.h), put into the flags.
void take_less_memory(Flags& flags, int rung);
// Into how many parts a micro-batch is cut on it.
int64_t parts_on(int rung);

}  // namespace train_gpt

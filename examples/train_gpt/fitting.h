// --device-memory and --host-memory: the setting that keeps below them, chosen before the first step
// (planning/fit.h). What the command line says itself stays as it says.
#pragma once

#include <string>

#include "examples/train_gpt/flags.h"
#include "planning/setting.h"
#include "zero/zeropage.h"

namespace train_gpt {

// What a simulated run on CUDA takes of a device besides tensors: as LibTorch does by our default, on sm_90.
zeropage::DeviceAllocator allocator_of_simulated_cuda();

// Puts the choice into the flags. Returns what it is, in a line; "" where no limit is given. Collective.
std::string fit_to_limits(const zeropage::World& world, Flags& flags);

}  // namespace train_gpt

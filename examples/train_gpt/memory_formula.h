// What a rank holds from step to step, computed from the flags alone.
#pragma once

#include <cstdint>
#include <string>

#include "examples/train_gpt/flags.h"
#include "memory/ledger.h"

namespace train_gpt {

// By tier.
struct MemoryFormula {
  zeropage::memory::Breakdown device;
  zeropage::memory::Breakdown host;
  zeropage::memory::Breakdown nvme;
};

// ZeRO's formula (Rajbhandari et al. 2020, section 5) for the chosen dtype, optimizer, states and
// tiers, a rank. With --offload-bytes as if all left.
MemoryFormula memory_formula(const Flags& flags, int64_t parameters, int world_size);

// State tensors of the parameter's size that an optimizer keeps.
int64_t state_tensors(const std::string& optimizer);

}  // namespace train_gpt

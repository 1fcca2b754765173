// Stochastic rounding as a loop over raw pointers: the reference, and what runs on the host. Free of
// torch.
#pragma once

#include "optim/cpu/instructions.h"
#include "optim/rounding_place.h"

namespace zeropage::optim::cpu {

// to, from: [numel], without overlap.
void round_stochastically(const float* from, BFloat16Bits* to, int64_t numel,
                          const RoundingPlace& place,
                          Instructions instructions = Instructions::kAvx512);

}  // namespace zeropage::optim::cpu

// Blocks of 8-bit states (offload/quantisation_map.h) to fp32 and back. Free of torch.
#pragma once

#include <cstdint>

#include "offload/cpu/instructions.h"
#include "offload/quantisation_map.h"

namespace zeropage::offload::cpu {

// codes, values: [numel] of one block, at most 256.
void dequantise(StateSign sign, const uint8_t* codes, float scale, float* values, int64_t numel,
                Instructions instructions = Instructions::kAvx512);

// Returns the block's scale.
float quantise(StateSign sign, const float* values, uint8_t* codes, int64_t numel,
               Instructions instructions = Instructions::kAvx512);

}  // namespace zeropage::offload::cpu

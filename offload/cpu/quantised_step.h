// Fused steps of whole blocks of 8-bit states with AVX-512: what packed_step does in passes over a
// tile, in one, with the same bits. Free of torch.
#pragma once

#include <cstdint>

#include "offload/flat_stretch.h"
#include "offload/update_rule.h"

namespace zeropage::offload::cpu {

// blocks x 256 elements; without overlap.
struct QuantisedBlocks {
  float* values = nullptr;
  const void* gradient = nullptr;
  Precision gradient_precision = Precision::kFloat;
  float gradient_scale = 1;
  uint8_t* codes[kMostStates] = {};
  float* scales[kMostStates] = {};  // [blocks]
  int64_t blocks = 0;
};

// Where best_instructions() are kAvx512.
void step_blocks_with_avx512(const UpdateRule& rule, const QuantisedBlocks& blocks);

}  // namespace zeropage::offload::cpu

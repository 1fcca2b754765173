// The loops over 8-bit states (optim/quantisation_map.h). Free of torch.
#pragma once

#include <cstdint>

#include "optim/cpu/instructions.h"
#include "optim/flat_stretch.h"
#include "optim/quantisation_map.h"
#include "optim/update_rule.h"

namespace zeropage::optim::cpu {

// [numel], the first of which is element first_in_block of its block; without overlap.
struct QuantisedStretch {
  float* values = nullptr;
  const void* gradient = nullptr;
  Precision gradient_precision = Precision::kFloat;
  float gradient_scale = 1;
  uint8_t* codes[kMostStates] = {};
  float* scales[kMostStates] = {};  // from the first element's block on; a cut block has one, too
  int64_t first_in_block = 0;
  int64_t numel = 0;
};

// All of them in a set of instructions.
struct QuantisedLoops {
  // In one pass over memory: a block's states become fp32 in the first-level cache, are stepped there, and
  // are codes again.
  void (*step)(const UpdateRule& rule, const QuantisedStretch& stretch);

  // codes, values: [numel] of one block, at most 256.
  void (*dequantise)(StateSign sign, const uint8_t* codes, float scale, float* values,
                     int64_t numel);

  // Returns the block's scale.
  float (*quantise)(StateSign sign, const float* values, uint8_t* codes, int64_t numel);
};

extern const QuantisedLoops kQuantisedLoopsOnAnyProcessor;
#if defined(__x86_64__)
extern const QuantisedLoops kQuantisedLoopsWithAvx2;
extern const QuantisedLoops kQuantisedLoopsWithAvx512;
#endif

inline const QuantisedLoops& quantised_loops(Instructions most = Instructions::kAvx512) {
  switch (usable(most)) {
#if defined(__x86_64__)
    case Instructions::kAvx512:
      return kQuantisedLoopsWithAvx512;
    case Instructions::kAvx2:
      return kQuantisedLoopsWithAvx2;
#endif
    default:
      return kQuantisedLoopsOnAnyProcessor;
  }
}

}  // namespace zeropage::optim::cpu

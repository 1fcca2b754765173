// Sums of squares and the look for infinities as loops over raw pointers. offload/flat_norm.h says
// in which order is summed. Free of torch.
#pragma once

#include "offload/cpu/instructions.h"
#include "offload/summation_tree.h"

namespace zeropage::offload::cpu {

// sums[b] of blocks [begin, end), for a flat buffer of numel elements.
void block_sums_of_squares(const FlatElements& flat, int64_t numel, double* sums, int64_t begin,
                           int64_t end, Instructions instructions = Instructions::kAvx512);

// Whether one of elements [begin, end) is infinite or NaN.
bool any_not_finite(const FlatElements& flat, int64_t begin, int64_t end);

}  // namespace zeropage::offload::cpu

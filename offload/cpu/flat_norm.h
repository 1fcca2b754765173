// Sums of squares and the look for infinities as loops over raw pointers. offload/flat_norm.h says
// in which order is summed. Free of torch.
#pragma once

#include <cstdint>

#include "offload/flat_stretch.h"
#include "offload/summation_tree.h"

namespace zeropage::offload::cpu {

// sums[b] of blocks [begin, end), for a flat buffer of numel elements.
void block_sums_of_squares(const void* flat, Precision precision, int64_t numel, double* sums,
                           int64_t begin, int64_t end);

// sums[c] of chunks [begin, end) of kChunkNumel terms each; the last may be shorter.
void sum_chunks(const double* terms, int64_t numel, double* sums, int64_t begin, int64_t end);

// Whether one of elements [begin, end) is infinite or NaN.
bool any_not_finite(const void* flat, Precision precision, int64_t begin, int64_t end);

}  // namespace zeropage::offload::cpu

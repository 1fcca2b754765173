// Sums of squares and the look for infinities as CUDA kernels, with the bits of optim/cpu. As
// optim/cuda/fused_step.h: no_cuda.cpp has them in builds without CUDA, `stream` is a
// cudaStream_t of the current device, and launches that fail throw. Free of torch and of CUDA.
#pragma once

#include "optim/exact_squares.h"
#include "optim/norm_part.h"

namespace zeropage::optim::cuda {

// Adds the squares of the parts exactly, in one launch; what is infinite or NaN is counted, and
// sets its part's flag. parts, ranges, one a sum, and words: memory of the device. most_blocks: of a
// range. REQUIRES: words that are zero, or hold what earlier calls on the same stream left there.
void add_norm_parts(const FlatElements& flat, const NormPart* parts, const NormRange* ranges,
                    int64_t most_blocks, const NormWords& words, void* stream);

// Sets *found to 1 if an element is infinite or NaN, and leaves it alone else.
void look_for_not_finite(const FlatElements& flat, int64_t numel, float* found, void* stream);

}  // namespace zeropage::optim::cuda

// Sums of squares and the look for infinities as CUDA kernels, with the bits of offload/cpu. As
// offload/cuda/fused_step.h: no_cuda.cpp has them in builds without CUDA, `stream` is a
// cudaStream_t of the current device, and launches that fail throw. Free of torch and of CUDA.
#pragma once

#include "offload/summation_tree.h"

namespace zeropage::offload::cuda {

// sums: one of each kBlockNumel elements.
void block_sums_of_squares(const FlatElements& flat, int64_t numel, double* sums, void* stream);

// Sets *found to 1 if an element is infinite or NaN, and leaves it alone else.
void look_for_not_finite(const FlatElements& flat, int64_t numel, float* found, void* stream);

}  // namespace zeropage::offload::cuda

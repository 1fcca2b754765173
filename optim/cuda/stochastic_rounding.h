// Stochastic rounding as a CUDA kernel, with the bits of optim/cpu. As optim/cuda/fused_step.h:
// no_cuda.cpp has it in builds without CUDA, `stream` is a cudaStream_t of the current device, and a
// launch that fails throws. Free of torch and of CUDA.
#pragma once

#include "optim/rounding_place.h"

namespace zeropage::optim::cuda {

void round_stochastically(const float* from, BFloat16Bits* to, int64_t numel,
                          const RoundingPlace& place, void* stream);

}  // namespace zeropage::optim::cuda

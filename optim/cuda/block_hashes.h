// Hashes of blocks as a CUDA kernel. As optim/cuda/fused_step.h: no_cuda.cpp has it in builds
// without CUDA, `stream` is a cudaStream_t of the current device, and a launch that fails throws.
// Free of torch and of CUDA.
#pragma once

#include <cstdint>

namespace zeropage::optim::cuda {

// hashes[b] of words [b block_words, (b + 1) block_words).
void block_hashes(const uint32_t* words, int64_t block_words, int64_t blocks, uint64_t* hashes,
                  void* stream);

}  // namespace zeropage::optim::cuda

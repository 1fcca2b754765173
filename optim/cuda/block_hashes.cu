#include "optim/cuda/block_hashes.h"
#include "optim/cuda/launch.cuh"
#include "optim/cuda/word_hash.cuh"

namespace zeropage::optim::cuda {
namespace {

// A warp hashes a block: lane l has words l, l + 32, ...
__global__ void __launch_bounds__(kThreads)
    hash_blocks(const uint32_t* __restrict__ words, int64_t block_words, int64_t blocks,
                uint64_t* __restrict__ hashes) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t block = blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarp; block < blocks;
       block += gridDim.x * int64_t{kWarps}) {
    const uint32_t* const first = words + block * block_words;
    uint64_t sum = 0;
    for (int64_t i = lane; i < block_words; i += kWarp) sum += first[i] * factor_of(i);
    sum = sum_of_lanes(sum);
    if (lane == 0) hashes[block] = sum;
  }
}

}  // namespace

void block_hashes(const uint32_t* words, int64_t block_words, int64_t blocks, uint64_t* hashes,
                  void* stream) {
  if (blocks == 0) return;
  launch({.what = "the launch of the hashes of blocks",
          .blocks = blocks_for(blocks, kWarps),
          .stream = stream},
         hash_blocks, words, block_words, blocks, hashes);
}

}  // namespace zeropage::optim::cuda

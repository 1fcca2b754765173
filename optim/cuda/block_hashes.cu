#include "optim/cuda/block_hashes.h"
#include "optim/cuda/launch.cuh"

namespace zeropage::optim::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffU;

// What a word is multiplied by, of 64 odd bits that differ from place to place (SplitMix64, Steele et
// al. 2014): a word that changed changes the sum.
__device__ __forceinline__ uint64_t factor_of(int64_t place) {
  uint64_t mixed = (static_cast<uint64_t>(place) + 1) * 0x9e3779b97f4a7c15U;
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9U;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebU;
  return (mixed ^ mixed >> 31) | 1U;
}

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
#pragma unroll
    for (int stride = kWarp / 2; stride > 0; stride /= 2) {
      sum += __shfl_down_sync(kAllLanes, static_cast<unsigned long long>(sum), stride);
    }
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

// What makes a sum of words a hash of their bits.
#pragma once

#include <cstdint>

#include "optim/cuda/launch.cuh"

namespace zeropage::optim::cuda {

// What a word is multiplied by, of 64 odd bits that differ from place to place (SplitMix64, Steele et
// al. 2014): a word that changed changes the sum.
__device__ __forceinline__ uint64_t factor_of(int64_t place) {
  uint64_t mixed = (static_cast<uint64_t>(place) + 1) * 0x9e3779b97f4a7c15U;
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9U;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebU;
  return (mixed ^ mixed >> 31) | 1U;
}

inline constexpr int kWarp = 32;
inline constexpr int kWarps = kThreads / kWarp;
inline constexpr unsigned kAllLanes = 0xffffffffU;

// Lane 0 gets that of all lanes.
__device__ __forceinline__ uint64_t sum_of_lanes(uint64_t sum) {
#pragma unroll
  for (int stride = kWarp / 2; stride > 0; stride /= 2) {
    sum += __shfl_down_sync(kAllLanes, static_cast<unsigned long long>(sum), stride);
  }
  return sum;
}

}  // namespace zeropage::optim::cuda

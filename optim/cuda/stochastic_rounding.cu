#include "optim/cuda/launch.cuh"
#include "optim/cuda/stochastic_rounding.h"
#include "optim/cuda/vectors.cuh"

namespace zeropage::optim::cuda {
namespace {

// from, to: of the block's first lane; every lane is there, and both are aligned to 16 bytes.
__device__ __forceinline__ void round_block(const float* from, BFloat16Bits* to,
                                            const PhiloxBlock& random) {
  Elements<float, kRoundingLanes> values;
  Elements<BFloat16Bits, kRoundingLanes> rounded;
  load(from, values);
#pragma unroll
  for (int lane = 0; lane < kRoundingLanes; ++lane) {
    assign_stochastically(rounded.at[lane], values.at[lane], lane_of(random, lane));
  }
  store(to, rounded);
}

// A thread rounds a block. The first and last may lack lanes; none is aligned if one is not.
__global__ void __launch_bounds__(kThreads)
    round_all(const float* __restrict__ from, BFloat16Bits* __restrict__ to, int64_t numel,
              const __grid_constant__ RoundingPlace place, bool aligned) {
  const int64_t first_block = place.first_element / kRoundingLanes;
  const int64_t blocks = (place.first_element + numel - 1) / kRoundingLanes - first_block + 1;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < blocks;
       i += gridDim.x * int64_t{kThreads}) {
    const int64_t block = first_block + i;
    const PhiloxBlock random = random_block(place, static_cast<uint64_t>(block));
    const int64_t begin = block * kRoundingLanes - place.first_element;
    if (aligned && begin >= 0 && begin + kRoundingLanes <= numel) {
      round_block(from + begin, to + begin, random);
      continue;
    }
#pragma unroll
    for (int lane = 0; lane < kRoundingLanes; ++lane) {
      const int64_t at = begin + lane;
      if (at < 0 || at >= numel) continue;
      assign_stochastically(to[at], from[at], lane_of(random, lane));
    }
  }
}

}  // namespace

void round_stochastically(const float* from, BFloat16Bits* to, int64_t numel,
                          const RoundingPlace& place, void* stream) {
  if (numel == 0) return;
  const int64_t head = (kRoundingLanes - place.first_element % kRoundingLanes) % kRoundingLanes;
  const bool aligned =
      is_aligned<kRoundingLanes>(from + head) && is_aligned<kRoundingLanes>(to + head);
  const unsigned blocks = blocks_for(numel / kRoundingLanes + 2, kThreads);
  launch({.what = "the launch of a stochastic rounding", .blocks = blocks, .stream = stream},
         round_all, from, to, numel, place, aligned);
}

}  // namespace zeropage::optim::cuda

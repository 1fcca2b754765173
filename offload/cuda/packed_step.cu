#include <type_traits>
#include <variant>

#include "offload/cuda/launch.cuh"
#include "offload/cuda/packed_step.h"

namespace zeropage::offload::cuda {
namespace {

// A block of threads steps a block of elements.
static_assert(kThreads == kStateBlockNumel);
constexpr int kWarpThreads = 32;
constexpr int kWarps = kThreads / kWarpThreads;

// Of all threads of the block, and for all of them.
__device__ __forceinline__ uint32_t largest_of_block(uint32_t mine) {
  __shared__ uint32_t of_warps[kWarps];
#pragma unroll
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffU, mine, distance);
    mine = other > mine ? other : mine;
  }
  __syncthreads();  // nobody reads the warps' of the time before any more
  if (threadIdx.x % kWarpThreads == 0) of_warps[threadIdx.x / kWarpThreads] = mine;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    mine = of_warps[warp] > mine ? of_warps[warp] : mine;
  }
  return mine;
}

template <typename Rule>
__device__ __forceinline__ StateSign sign_of(int state) {
  return state < Rule::kSignedStates ? StateSign::kSigned : StateSign::kUnsigned;
}

template <typename Rule>
__device__ __forceinline__ float load_state(const PackedStretch& stretch, int state, int64_t i,
                                            int64_t block) {
  const void* const from = stretch.states[state];
  switch (stretch.format) {
    case StateFormat::kFp32:
      return static_cast<const float*>(from)[i];
    case StateFormat::kBf16:
      return to_float(static_cast<const BFloat16Bits*>(from)[i]);
    case StateFormat::k8Bit:
      break;
  }
  const uint8_t code = static_cast<const uint8_t*>(from)[i];
  const float scale = stretch.scales[state][block];
  return sign_of<Rule>(state) == StateSign::kSigned
             ? dequantised<StateSign::kSigned>(code, scale)
             : dequantised<StateSign::kUnsigned>(code, scale);
}

__device__ __forceinline__ uint32_t random_lane(const RoundingPlace& place) {
  const auto element = static_cast<uint64_t>(place.first_element);
  const PhiloxBlock random = random_block(place, element / kRoundingLanes);
  const auto lane = static_cast<uint32_t>(element % kRoundingLanes);
  const uint32_t low_pair = lane / 2 == 0 ? random.words[0] : random.words[1];
  const uint32_t high_pair = lane / 2 == 2 ? random.words[2] : random.words[3];
  const uint32_t word = lane < kRoundingLanes / 2 ? low_pair : high_pair;
  return lane % 2 == 0 ? word & 0xffffU : word >> 16;
}

// All threads of the block call it; those without an element are not active.
template <typename Rule>
__device__ __forceinline__ void store_state(const PackedStretch& stretch, int state, int64_t i,
                                            int64_t block, float value, bool active) {
  void* const to = stretch.states[state];
  if (stretch.format == StateFormat::kFp32) {
    if (active) static_cast<float*>(to)[i] = value;
    return;
  }
  if (stretch.format == StateFormat::kBf16) {
    if (active) {
      assign_stochastically(static_cast<BFloat16Bits*>(to)[i], value,
                            random_lane(place_of_state(stretch, state, i)));
    }
    return;
  }
  const BlockScale scale = block_scale(largest_of_block(active ? magnitude_of(value) : 0));
  if (threadIdx.x == 0) stretch.scales[state][block] = scale.scale;
  if (!active) return;
  uint8_t code = 0;
  if (scale.inverse != 0) {
    code = sign_of<Rule>(state) == StateSign::kSigned
               ? quantised<StateSign::kSigned>(value, scale.inverse)
               : quantised<StateSign::kUnsigned>(value, scale.inverse);
  }
  static_cast<uint8_t*>(to)[i] = code;
}

__device__ __forceinline__ void store_value(const PackedStretch& stretch, int64_t i, float value) {
  if (stretch.high != nullptr) {
    const SplitValue both = split(value);
    stretch.high[i] = both.high;
    stretch.low[i] = both.low;
    return;
  }
  const FlatStretch& flat = stretch.flat;
  flat.values[i] = value;
  if (flat.copy_out == nullptr) return;
  if (flat.copy_precision == Precision::kBFloat16) {
    assign(static_cast<BFloat16Bits*>(flat.copy_out)[i], value);
  } else {
    assign(static_cast<HalfBits*>(flat.copy_out)[i], value);
  }
}

// All bits 0 are +0 in each precision.
template <typename Gradient>
__device__ __forceinline__ void zero_gradient(const FlatStretch& flat, int64_t i) {
  static_cast<Gradient*>(flat.gradient_to_zero)[i] = Gradient{};
}

template <typename Rule, typename Gradient>
__global__ void __launch_bounds__(kThreads)
    update_packed(const __grid_constant__ Rule rule, const __grid_constant__ PackedStretch stretch,
                  int64_t blocks) {
  const FlatStretch& flat = stretch.flat;
  const bool is_made = flat.found_inf == nullptr || *flat.found_inf == 0.0F;
  if (!is_made && flat.gradient_to_zero == nullptr) return;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t i = block * kStateBlockNumel + threadIdx.x - stretch.first_in_block;
    const bool active = i >= 0 && i < flat.numel;
    if (active && flat.gradient_to_zero != nullptr && !is_made) zero_gradient<Gradient>(flat, i);
    if (!is_made) continue;
    float states[kMostStates] = {};
    if (active) {
#pragma unroll
      for (int state = 0; state < Rule::kStates; ++state) {
        states[state] = load_state<Rule>(stretch, state, i, block);
      }
      const float gradient = rounded::multiply(
          to_float(static_cast<const Gradient*>(flat.gradient)[i]), flat.gradient_scale);
      if (flat.gradient_to_zero != nullptr) zero_gradient<Gradient>(flat, i);
      const float old =
          stretch.high != nullptr ? joined(stretch.high[i], stretch.low[i]) : flat.values[i];
      store_value(stretch, i, rule.apply(old, gradient, states));
    }
    // Behind the first reduction's barriers, where all have read the scales.
#pragma unroll
    for (int state = 0; state < Rule::kStates; ++state) {
      store_state<Rule>(stretch, state, i, block, states[state], active);
    }
  }
}

}  // namespace

void packed_step(const UpdateRule& rule, const PackedStretch& stretch, void* stream) {
  const int64_t blocks = blocks_of(stretch.first_in_block, stretch.flat.numel);
  if (blocks == 0) return;
  std::visit(
      [&]<typename Rule>(const Rule& of_class) {
        visit_precision(stretch.flat.gradient_precision, [&]<typename Gradient>() {
          launch({.what = "the launch of a packed step",
                  .blocks = blocks_for(blocks, 1),
                  .stream = stream},
                 update_packed<Rule, Gradient>, of_class, stretch, blocks);
        });
      },
      rule);
}

}  // namespace zeropage::offload::cuda

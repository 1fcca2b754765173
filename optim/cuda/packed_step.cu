#include <type_traits>
#include <variant>

#include "optim/cuda/fused_step.h"
#include "optim/cuda/launch.cuh"
#include "optim/cuda/packed_lane.cuh"
#include "optim/cuda/packed_step.h"

namespace zeropage::optim::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
// At least: a lane may have 128 registers. Told nothing, nvcc spills to have more blocks.
constexpr int kBlocksOfProcessor = 2;

// Where blocks begin: `before` elements before the stretch's first.
struct Blocks {
  int64_t count = 0;
  int64_t before = 0;
  bool are_aligned = false;  // their eighths, in every buffer
};

__device__ __forceinline__ int of_lane(int64_t count) {
  return static_cast<int>(count < 0 ? 0 : count < kOfLane ? count : kOfLane);
}

__device__ __forceinline__ Part part_of(const Blocks& blocks, int64_t block, int64_t numel) {
  const int64_t first =
      block * kStateBlockNumel - blocks.before + threadIdx.x % kWarp * int64_t{kOfLane};
  return {first, of_lane(-first), of_lane(numel - first)};
}

// All lanes of the warp call it; some may have no element.
template <typename Rule, typename Gradient, StateFormat kFormat, Values kValues>
__device__ __forceinline__ void step_block(const Rule& rule, const PackedStretch& stretch,
                                           int64_t block, const Part& part, bool is_whole) {
  Lane<Rule, Gradient, kFormat, kValues> lane;
  if constexpr (kFormat == StateFormat::k8Bit) {
#pragma unroll
    for (int state = 0; state < Rule::kStates; ++state) {
      lane.scales[state] = stretch.scales[state][block];
    }
  }
  if (is_whole) {
    lane.load_all(stretch, Whole{part.first});
  } else {
    lane.load_all(stretch, part);
  }
  lane.unpack();
  lane.update(rule, stretch.flat.gradient_scale);
  lane.pack(stretch, part);
  if (is_whole) {
    lane.store_all(stretch, Whole{part.first});
  } else {
    lane.store_all(stretch, part);
  }
  // Every lane has read the old scale: the new one is made of what all of them made of it.
  if constexpr (kFormat == StateFormat::k8Bit) {
    if (threadIdx.x % kWarp != 0) return;
#pragma unroll
    for (int state = 0; state < Rule::kStates; ++state) {
      stretch.scales[state][block] = lane.scales[state];
    }
  }
}

// All bits 0 are +0 in each precision.
template <typename Gradient>
__device__ __forceinline__ void zero_gradient(const FlatStretch& flat, const Part& part,
                                              bool is_whole) {
  auto* const gradients = static_cast<Gradient*>(flat.gradient_to_zero);
  if (is_whole) {
    Whole{part.first}.store_to(gradients, Eight<Gradient>{});
  } else {
    part.store_to(gradients, Eight<Gradient>{});
  }
}

template <typename Rule, typename Gradient, StateFormat kFormat, Values kValues>
__global__ void __launch_bounds__(kThreads, kBlocksOfProcessor)
    update_packed(const __grid_constant__ Rule rule, const __grid_constant__ PackedStretch stretch,
                  const __grid_constant__ Blocks blocks) {
  const FlatStretch& flat = stretch.flat;
  const bool is_made = flat.found_inf == nullptr || *flat.found_inf == 0.0F;
  if (!is_made && flat.gradient_to_zero == nullptr) return;
  for (int64_t block = blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarp; block < blocks.count;
       block += gridDim.x * int64_t{kWarps}) {
    const Part part = part_of(blocks, block, flat.numel);
    const bool is_whole = blocks.are_aligned && part.is_whole();
    if (is_made) {
      step_block<Rule, Gradient, kFormat, kValues>(rule, stretch, block, part, is_whole);
    }
    if (flat.gradient_to_zero != nullptr) zero_gradient<Gradient>(flat, part, is_whole);
  }
}

template <typename Gradient, StateFormat kFormat, Values kValues>
bool are_aligned(const PackedStretch& stretch, int states, int64_t before) {
  const FlatStretch& flat = stretch.flat;
  const auto aligned = [&](const auto* pointer) { return is_aligned<kOfLane>(pointer, before); };
  bool all = aligned(static_cast<const Gradient*>(flat.gradient));
  if constexpr (kValues == Values::kSplit) {
    all = all && aligned(stretch.high) && aligned(stretch.low);
  } else {
    const auto* const copies = static_cast<const BFloat16Bits*>(flat.copy_out);  // or fp16, alike
    all = all && aligned(flat.values) && (copies == nullptr || aligned(copies));
  }
  for (int state = 0; state < states; ++state) {
    all = all && aligned(static_cast<const StateElement<kFormat>*>(stretch.states[state]));
  }
  return all;
}

// Only scales tie blocks to places. Elsewhere they begin where vectors of 16 bits do.
template <StateFormat kFormat, Values kValues>
int64_t elements_before(const PackedStretch& stretch) {
  if constexpr (kFormat == StateFormat::k8Bit) return stretch.first_in_block;
  const void* const pointer = kValues == Values::kSplit ? stretch.high : stretch.states[0];
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer) % sizeof(uint4) /
                              sizeof(BFloat16Bits));
}

template <typename Rule, typename Gradient, StateFormat kFormat, Values kValues>
void launch_packed(const Rule& rule, const PackedStretch& stretch, void* stream) {
  Blocks blocks{.before = elements_before<kFormat, kValues>(stretch)};
  blocks.count = blocks_of(blocks.before, stretch.flat.numel);
  blocks.are_aligned =
      are_aligned<Gradient, kFormat, kValues>(stretch, Rule::kStates, blocks.before);
  launch({.what = "the launch of a packed step",
          .blocks = blocks_for(blocks.count, kWarps),
          .stream = stream},
         update_packed<Rule, Gradient, kFormat, kValues>, rule, stretch, blocks);
}

template <typename Rule, typename Gradient, StateFormat kFormat>
void launch_with_values(const Rule& rule, const PackedStretch& stretch, void* stream) {
  if (stretch.high != nullptr) {
    return launch_packed<Rule, Gradient, kFormat, Values::kSplit>(rule, stretch, stream);
  }
  // With fp32 states too it is no packed stretch.
  if constexpr (kFormat != StateFormat::kFp32) {
    launch_packed<Rule, Gradient, kFormat, Values::kFp32>(rule, stretch, stream);
  }
}

// A rule without states has no format.
template <typename Rule, typename Gradient>
void launch_with_states(const Rule& rule, const PackedStretch& stretch, void* stream) {
  if constexpr (Rule::kStates > 0) {
    if (stretch.format == StateFormat::kBf16) {
      return launch_with_values<Rule, Gradient, StateFormat::kBf16>(rule, stretch, stream);
    }
    if (stretch.format == StateFormat::k8Bit) {
      return launch_with_values<Rule, Gradient, StateFormat::k8Bit>(rule, stretch, stream);
    }
  }
  launch_with_values<Rule, Gradient, StateFormat::kFp32>(rule, stretch, stream);
}

// Nothing of it is packed.
FlatStretch flat_of(const PackedStretch& stretch) {
  FlatStretch flat = stretch.flat;
  for (int state = 0; state < kMostStates; ++state) {
    flat.states[state] = static_cast<float*>(stretch.states[state]);
  }
  return flat;
}

}  // namespace

void packed_step(const UpdateRule& rule, const PackedStretch& stretch, void* stream) {
  if (stretch.flat.numel == 0) return;
  std::visit(
      [&]<typename Rule>(const Rule& of_class) {
        const bool has_fp32_states = stretch.format == StateFormat::kFp32 || Rule::kStates == 0;
        if (has_fp32_states && stretch.high == nullptr) {
          return fused_step(rule, flat_of(stretch), stream);
        }
        visit_precision(stretch.flat.gradient_precision, [&]<typename Gradient>() {
          launch_with_states<Rule, Gradient>(of_class, stretch, stream);
        });
      },
      rule);
}

}  // namespace zeropage::optim::cuda

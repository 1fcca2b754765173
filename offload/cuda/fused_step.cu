#include <type_traits>
#include <variant>

#include "offload/cuda/fused_step.h"
#include "offload/cuda/launch.cuh"

namespace zeropage::offload::cuda {
namespace {

// What a thread loads and stores at once: 16 bytes of fp32, 8 of bf16 or fp16.
constexpr int kLanes = 4;
template <typename Element>
struct Quad {
  Element at[kLanes];
};

// Of an assignment nvcc may make four narrow stores, of __stwb one wide one.
__device__ __forceinline__ Quad<float> load_quad(const float* from) {
  const float4 loaded = *reinterpret_cast<const float4*>(from);
  return {{loaded.x, loaded.y, loaded.z, loaded.w}};
}
template <typename Bits>
__device__ __forceinline__ Quad<Bits> load_quad(const Bits* from) {
  const ushort4 loaded = *reinterpret_cast<const ushort4*>(from);
  return {{{loaded.x}, {loaded.y}, {loaded.z}, {loaded.w}}};
}
__device__ __forceinline__ void store_quad(float* to, const Quad<float>& quad) {
  __stwb(reinterpret_cast<float4*>(to),
         make_float4(quad.at[0], quad.at[1], quad.at[2], quad.at[3]));
}
template <typename Bits>
__device__ __forceinline__ void store_quad(Bits* to, const Quad<Bits>& quad) {
  __stwb(reinterpret_cast<ushort4*>(to),
         make_ushort4(quad.at[0].bits, quad.at[1].bits, quad.at[2].bits, quad.at[3].bits));
}

// Quads of a thread in flight: all their loads are issued before the first is waited for.
constexpr int kInFlight = 2;

// Elements [head, head + 4 quads) are aligned in every pointer; the others go one by one.
struct Split {
  int64_t head = 0;
  int64_t quads = 0;
};

template <typename Rule, typename Gradient, typename Copy>
struct Loaded {
  Quad<Gradient> gradient;
  Quad<float> values;
  Quad<float> states[Rule::kStates + 1];  // one more, since there is no array of none

  __device__ __forceinline__ void load(const FlatStretch& stretch, int64_t first) {
    gradient = load_quad(static_cast<const Gradient*>(stretch.gradient) + first);
    values = load_quad(static_cast<const float*>(stretch.values) + first);
#pragma unroll
    for (int state = 0; state < Rule::kStates; ++state) {
      states[state] = load_quad(static_cast<const float*>(stretch.states[state]) + first);
    }
  }

  __device__ __forceinline__ void update_and_store(const Rule& rule, const FlatStretch& stretch,
                                                   int64_t first) {
    Quad<Copy> copies;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      float of_lane[kMostStates] = {};
#pragma unroll
      for (int state = 0; state < Rule::kStates; ++state) of_lane[state] = states[state].at[lane];
      const float scaled = rounded::multiply(to_float(gradient.at[lane]), stretch.gradient_scale);
      values.at[lane] = rule.apply(values.at[lane], scaled, of_lane);
      assign(copies.at[lane], values.at[lane]);
#pragma unroll
      for (int state = 0; state < Rule::kStates; ++state) states[state].at[lane] = of_lane[state];
    }
    store_quad(stretch.values + first, values);
#pragma unroll
    for (int state = 0; state < Rule::kStates; ++state) {
      store_quad(stretch.states[state] + first, states[state]);
    }
    if constexpr (!std::is_same_v<Copy, NoCopy>) {
      store_quad(static_cast<Copy*>(stretch.copy_out) + first, copies);
    }
    if (stretch.gradient_to_zero != nullptr) {
      store_quad(static_cast<Gradient*>(stretch.gradient_to_zero) + first, Quad<Gradient>{});
    }
  }
};

template <typename Rule, typename Gradient, typename Copy>
__device__ __forceinline__ void update_one(const Rule& rule, const FlatStretch& stretch,
                                           int64_t i) {
  float states[kMostStates] = {};
#pragma unroll
  for (int state = 0; state < Rule::kStates; ++state) states[state] = stretch.states[state][i];
  const float gradient = rounded::multiply(
      to_float(static_cast<const Gradient*>(stretch.gradient)[i]), stretch.gradient_scale);
  const float value = rule.apply(stretch.values[i], gradient, states);
  stretch.values[i] = value;
#pragma unroll
  for (int state = 0; state < Rule::kStates; ++state) stretch.states[state][i] = states[state];
  if constexpr (!std::is_same_v<Copy, NoCopy>) {
    assign(static_cast<Copy*>(stretch.copy_out)[i], value);
  }
  if (stretch.gradient_to_zero != nullptr) {
    static_cast<Gradient*>(stretch.gradient_to_zero)[i] = Gradient{};
  }
}

// Instead of an update, where an infinity was found: one element after the other, as it is rare.
template <typename Gradient>
__device__ __forceinline__ void zero_gradient(const FlatStretch& stretch) {
  if (stretch.gradient_to_zero == nullptr) return;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < stretch.numel;
       i += gridDim.x * int64_t{kThreads}) {
    static_cast<Gradient*>(stretch.gradient_to_zero)[i] = Gradient{};
  }
}

template <typename Rule, typename Gradient, typename Copy>
__global__ void __launch_bounds__(kThreads)
    update(const __grid_constant__ Rule rule, const __grid_constant__ FlatStretch stretch,
           const __grid_constant__ Split split) {
  if (stretch.found_inf != nullptr && *stretch.found_inf != 0.0F) {
    zero_gradient<Gradient>(stretch);
    return;
  }
  constexpr int64_t kTile = kThreads * kInFlight;
  for (int64_t first = blockIdx.x * kTile + threadIdx.x; first < split.quads;
       first += gridDim.x * kTile) {
    Loaded<Rule, Gradient, Copy> loaded[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t quad = first + k * kThreads;
      if (quad < split.quads) loaded[k].load(stretch, split.head + kLanes * quad);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t quad = first + k * kThreads;
      if (quad < split.quads) {
        loaded[k].update_and_store(rule, stretch, split.head + kLanes * quad);
      }
    }
  }
  const int64_t singles = stretch.numel - kLanes * split.quads;
  for (int64_t single = blockIdx.x * int64_t{kThreads} + threadIdx.x; single < singles;
       single += gridDim.x * int64_t{kThreads}) {
    const int64_t i = single < split.head ? single : single + kLanes * split.quads;
    update_one<Rule, Gradient, Copy>(rule, stretch, i);
  }
}

template <typename Element>
bool is_aligned(const Element* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % (kLanes * sizeof(Element)) == 0;
}

// A slice of a flat buffer begins anywhere, but at the same element in all of its buffers: then
// all are aligned after the same few elements. If they are not, everything is head.
template <typename Rule, typename Gradient, typename Copy>
Split split_of(const FlatStretch& stretch) {
  for (int64_t head = 0; head < kLanes && head < stretch.numel; ++head) {
    bool aligned = is_aligned(stretch.values + head) &&
                   is_aligned(static_cast<const Gradient*>(stretch.gradient) + head);
    for (int state = 0; state < Rule::kStates; ++state) {
      aligned = aligned && is_aligned(stretch.states[state] + head);
    }
    if constexpr (!std::is_same_v<Copy, NoCopy>) {
      aligned = aligned && is_aligned(static_cast<const Copy*>(stretch.copy_out) + head);
    }
    if (aligned) return {.head = head, .quads = (stretch.numel - head) / kLanes};
  }
  return {.head = stretch.numel, .quads = 0};
}

}  // namespace

bool is_built() {
  return true;
}

void fused_step(const UpdateRule& rule, const FlatStretch& stretch, void* stream) {
  if (stretch.numel == 0) return;
  std::visit(
      [&]<typename Rule>(const Rule& of_class) {
        visit_types(stretch, [&]<typename Gradient, typename Copy>() {
          const Split split = split_of<Rule, Gradient, Copy>(stretch);
          const int64_t singles = stretch.numel - kLanes * split.quads;
          const unsigned blocks = std::max(blocks_for(split.quads, kThreads * kInFlight),
                                           blocks_for(singles, kThreads));
          launch({.what = "the launch of a fused step", .blocks = blocks, .stream = stream},
                 update<Rule, Gradient, Copy>, of_class, stretch, split);
        });
      },
      rule);
}

}  // namespace zeropage::offload::cuda

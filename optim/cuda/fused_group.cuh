// What the kernels of fused steps do to elements: to a group that a thread loads and stores at once, or to one.
#pragma once

#include <type_traits>

#include "optim/cuda/vectors.cuh"
#include "optim/flat_stretch.h"
#include "optim/update_rule.h"

namespace zeropage::optim::cuda {

// Elements that a thread steps together: what the narrowest of them is in 16 bytes.
template <typename Gradient, typename Copy>
constexpr int kTogether = sizeof(Gradient) == 4 && std::is_same_v<Copy, NoCopy> ? 4 : 8;

// Elements of a thread in flight: all their loads are issued before the first is waited for.
inline constexpr int kInFlight = 8;

template <typename Rule, typename Gradient, typename Copy>
struct Group {
  static constexpr int kCount = kTogether<Gradient, Copy>;

  Elements<Gradient, kCount> gradient;
  Elements<float, kCount> values;
  Elements<float, kCount> states[Rule::kStates + 1];  // one more: there is no array of none
  Elements<Copy, kCount> copies;

  __device__ __forceinline__ void load_all(const FlatStretch& stretch, int64_t first) {
    load(static_cast<const Gradient*>(stretch.gradient) + first, gradient);
    load(stretch.values + first, values);
#pragma unroll
    for (int state = 0; state < Rule::kStates; ++state) {
      load(stretch.states[state] + first, states[state]);
    }
    if constexpr (!std::is_same_v<Copy, NoCopy>) {
      if (stretch.adopts_copy) load(static_cast<const Copy*>(stretch.copy_out) + first, copies);
    }
  }

  __device__ __forceinline__ void update_and_store(const Rule& rule, const FlatStretch& stretch,
                                                   int64_t first) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if constexpr (!std::is_same_v<Copy, NoCopy>) {
        if (stretch.adopts_copy) values.at[k] = adopted(values.at[k], copies.at[k]);
      }
      float of_element[kMostStates] = {};
#pragma unroll
      for (int state = 0; state < Rule::kStates; ++state) of_element[state] = states[state].at[k];
      const float scaled =
          optim::rounded::multiply(to_float(gradient.at[k]), stretch.gradient_scale);
      values.at[k] = rule.apply(values.at[k], scaled, of_element);
      assign(copies.at[k], values.at[k]);
#pragma unroll
      for (int state = 0; state < Rule::kStates; ++state) states[state].at[k] = of_element[state];
    }
    store(stretch.values + first, values);
#pragma unroll
    for (int state = 0; state < Rule::kStates; ++state) {
      store(stretch.states[state] + first, states[state]);
    }
    if constexpr (!std::is_same_v<Copy, NoCopy>) {
      store(static_cast<Copy*>(stretch.copy_out) + first, copies);
    }
    if (stretch.gradient_to_zero != nullptr) {
      store(static_cast<Gradient*>(stretch.gradient_to_zero) + first, Elements<Gradient, kCount>{});
    }
  }
};

template <typename Rule, typename Gradient, typename Copy>
__device__ __forceinline__ void update_one(const Rule& rule, const FlatStretch& stretch,
                                           int64_t i) {
  float states[kMostStates] = {};
#pragma unroll
  for (int state = 0; state < Rule::kStates; ++state) states[state] = stretch.states[state][i];
  const float gradient = optim::rounded::multiply(
      to_float(static_cast<const Gradient*>(stretch.gradient)[i]), stretch.gradient_scale);
  float before = stretch.values[i];
  if constexpr (!std::is_same_v<Copy, NoCopy>) {
    if (stretch.adopts_copy)
      before = adopted(before, static_cast<const Copy*>(stretch.copy_out)[i]);
  }
  const float value = rule.apply(before, gradient, states);
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

}  // namespace zeropage::optim::cuda

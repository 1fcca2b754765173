// What a lane does to its eight elements in a packed step: loads, unpacks, updates, packs, stores.
#pragma once

#include <type_traits>

#include "optim/cuda/vectors.cuh"
#include "optim/packed_stretch.h"

namespace zeropage::optim::cuda {

// A warp steps a block of elements, each of its lanes eight behind each other.
inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffU;
inline constexpr int kOfLane = kStateBlockNumel / kWarp;
static_assert(kOfLane == kRoundingLanes);  // a lane needs the bits of one Philox block

template <typename Element>
using Eight = Elements<Element, kOfLane>;

enum class Values : uint8_t { kFp32, kSplit };

template <StateFormat kFormat>
using StateElement =
    std::conditional_t<kFormat == StateFormat::kFp32, float,
                       std::conditional_t<kFormat == StateFormat::kBf16, BFloat16Bits, uint8_t>>;

// The eight elements of a lane from `first` on, of which the stretch has [begin, end).
struct Part {
  int64_t first;
  int begin;
  int end;

  __device__ __forceinline__ bool has(int k) const { return k >= begin && k < end; }
  __device__ __forceinline__ bool is_whole() const { return begin == 0 && end == kOfLane; }

  template <typename Element>
  __device__ __forceinline__ void load_from(const Element* from, Eight<Element>& to) const {
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) to.at[k] = has(k) ? from[first + k] : Element{};
  }
  template <typename Element>
  __device__ __forceinline__ void store_to(Element* to, const Eight<Element>& from) const {
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      if (has(k)) to[first + k] = from.at[k];
    }
  }
};

// All eight, aligned in every buffer.
struct Whole {
  int64_t first;

  template <typename Element>
  __device__ __forceinline__ void load_from(const Element* from, Eight<Element>& to) const {
    load(from + first, to);
  }
  template <typename Element>
  __device__ __forceinline__ void store_to(Element* to, const Eight<Element>& from) const {
    store(to + first, from);
  }
};

// Eight lanes of 16 random bits from lane `skipped` of `low` on, the rest from `high`. In moves by
// known distances: an index that is known only when it runs would put the words into memory.
__device__ __forceinline__ PhiloxBlock shifted(const PhiloxBlock& low, const PhiloxBlock& high,
                                               uint32_t skipped) {
  uint32_t words[] = {low.words[0],  low.words[1],  low.words[2],  low.words[3],
                      high.words[0], high.words[1], high.words[2], high.words[3]};
#pragma unroll
  for (int distance = 2; distance > 0; distance /= 2) {
    const bool moves = (skipped & 2U * distance) != 0;
#pragma unroll
    for (int word = 0; word + distance < 8; ++word) {
      words[word] = moves ? words[word + distance] : words[word];
    }
  }
  PhiloxBlock taken;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const uint32_t halves = words[word] >> 16 | words[word + 1] << 16;
    taken.words[word] = skipped % 2 != 0 ? halves : words[word];
  }
  return taken;
}

// Eight lanes from place.first_element on. It is negative where a lane's first elements are not the
// stretch's: what they get is not used.
__device__ __forceinline__ PhiloxBlock random_lanes(const RoundingPlace& place) {
  const auto block = static_cast<uint64_t>(place.first_element >> 3);
  const auto skipped = static_cast<uint32_t>(place.first_element & (kRoundingLanes - 1));
  const PhiloxBlock low = random_block(place, block);
  if (skipped == 0) return low;
  return shifted(low, random_block(place, block + 1), skipped);
}

template <typename Rule, typename Gradient, StateFormat kFormat, Values kValues>
struct Lane {
  static constexpr int kStates = Rule::kStates;
  using State = StateElement<kFormat>;

  // One more, since there is no array of none.
  Eight<State> packed[kStates + 1];
  float scales[kStates + 1];
  float states[kStates + 1][kOfLane];
  Eight<Gradient> gradients;
  Eight<float> values;
  Eight<BFloat16Bits> high;
  Eight<uint16_t> low;

  template <typename Access>
  __device__ __forceinline__ void load_all(const PackedStretch& stretch, const Access& access) {
    access.load_from(static_cast<const Gradient*>(stretch.flat.gradient), gradients);
    if constexpr (kValues == Values::kSplit) {
      access.load_from(stretch.high, high);
      access.load_from(stretch.low, low);
    } else {
      access.load_from(stretch.flat.values, values);
      adopt_copy(stretch.flat, access);
    }
#pragma unroll
    for (int state = 0; state < kStates; ++state) {
      access.load_from(static_cast<const State*>(stretch.states[state]), packed[state]);
    }
  }

  template <typename Access>
  __device__ __forceinline__ void adopt_copy(const FlatStretch& flat, const Access& access) {
    if (!flat.adopts_copy) return;
    if (flat.copy_precision == Precision::kBFloat16) {
      adopt_copy_of<BFloat16Bits>(flat.copy_out, access);
    } else {
      adopt_copy_of<HalfBits>(flat.copy_out, access);
    }
  }

  template <typename Copy, typename Access>
  __device__ __forceinline__ void adopt_copy_of(const void* from, const Access& access) {
    Eight<Copy> copies;
    access.load_from(static_cast<const Copy*>(from), copies);
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) values.at[k] = adopted(values.at[k], copies.at[k]);
  }

  __device__ __forceinline__ void unpack() {
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      if constexpr (kValues == Values::kSplit) values.at[k] = joined(high.at[k], low.at[k]);
#pragma unroll
      for (int state = 0; state < kStates; ++state) {
        states[state][k] = unpacked(state, packed[state].at[k]);
      }
    }
  }

  __device__ __forceinline__ float unpacked(int state, State element) const {
    if constexpr (kFormat == StateFormat::k8Bit) {
      return state < Rule::kSignedStates
                 ? dequantised<StateSign::kSigned>(element, scales[state])
                 : dequantised<StateSign::kUnsigned>(element, scales[state]);
    } else {
      return to_float(element);
    }
  }

  __device__ __forceinline__ void update(const Rule& rule, float gradient_scale) {
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      float of_element[kMostStates] = {};
#pragma unroll
      for (int state = 0; state < kStates; ++state) of_element[state] = states[state][k];
      const float gradient = optim::rounded::multiply(to_float(gradients.at[k]), gradient_scale);
      values.at[k] = rule.apply(values.at[k], gradient, of_element);
#pragma unroll
      for (int state = 0; state < kStates; ++state) states[state][k] = of_element[state];
    }
  }

  // All lanes of the warp call it.
  __device__ __forceinline__ void pack(const PackedStretch& stretch, const Part& part) {
    if constexpr (kValues == Values::kSplit) {
#pragma unroll
      for (int k = 0; k < kOfLane; ++k) {
        const SplitValue both = split(values.at[k]);
        high.at[k] = both.high;
        low.at[k] = both.low;
      }
    }
#pragma unroll
    for (int state = 0; state < kStates; ++state) pack_state(stretch, part, state);
  }

  __device__ __forceinline__ void pack_state(const PackedStretch& stretch, const Part& part,
                                             int state) {
    if constexpr (kFormat == StateFormat::kFp32) {
#pragma unroll
      for (int k = 0; k < kOfLane; ++k) packed[state].at[k] = states[state][k];
    } else if constexpr (kFormat == StateFormat::kBf16) {
      const PhiloxBlock random = random_lanes(place_of_state(stretch, state, part.first));
#pragma unroll
      for (int k = 0; k < kOfLane; ++k) {
        assign_stochastically(packed[state].at[k], states[state][k], lane_of(random, k));
      }
    } else {
      quantise(part, state);
    }
  }

  __device__ __forceinline__ void quantise(const Part& part, int state) {
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      const uint32_t magnitude = part.has(k) ? magnitude_of(states[state][k]) : 0;
      largest = magnitude > largest ? magnitude : largest;
    }
    const BlockScale scale = block_scale(__reduce_max_sync(kAllLanes, largest));
    scales[state] = scale.scale;
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      const float value = states[state][k];
      const uint8_t code = state < Rule::kSignedStates
                               ? quantised<StateSign::kSigned>(value, scale.inverse)
                               : quantised<StateSign::kUnsigned>(value, scale.inverse);
      packed[state].at[k] = scale.inverse != 0 ? code : 0;
    }
  }

  template <typename Access>
  __device__ __forceinline__ void store_all(const PackedStretch& stretch,
                                            const Access& access) const {
    if constexpr (kValues == Values::kSplit) {
      access.store_to(stretch.high, high);
      access.store_to(stretch.low, low);
    } else {
      access.store_to(stretch.flat.values, values);
      store_copy(stretch.flat, access);
    }
#pragma unroll
    for (int state = 0; state < kStates; ++state) {
      access.store_to(static_cast<State*>(stretch.states[state]), packed[state]);
    }
  }

  template <typename Access>
  __device__ __forceinline__ void store_copy(const FlatStretch& flat, const Access& access) const {
    if (flat.copy_out == nullptr) return;
    if (flat.copy_precision == Precision::kBFloat16) {
      store_copy_as<BFloat16Bits>(flat.copy_out, access);
    } else {
      store_copy_as<HalfBits>(flat.copy_out, access);
    }
  }

  template <typename Copy, typename Access>
  __device__ __forceinline__ void store_copy_as(void* to, const Access& access) const {
    Eight<Copy> copies;
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) assign(copies.at[k], values.at[k]);
    access.store_to(static_cast<Copy*>(to), copies);
  }
};

}  // namespace zeropage::optim::cuda

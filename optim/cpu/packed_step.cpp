#include "optim/cpu/packed_step.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <variant>

#include "optim/cpu/fused_step.h"
#include "optim/cpu/quantised_loops.h"
#include "optim/cpu/stochastic_rounding.h"

namespace zeropage::optim::cpu {
namespace {

// Eight blocks: their values, gradient and states in fp32 are a first-level cache.
constexpr int64_t kTileNumel = 8 * kStateBlockNumel;
// Where values and codes are stepped where they lie: loops over codes take the blocks between a first and a last one the
// fastest, and what is done to a tile besides finds it in the second-level cache.
constexpr int64_t kTileOfCodesNumel = 32 * kTileNumel;

struct Tile {
  alignas(64) float values[kTileNumel];
  alignas(64) float states[kMostStates][kTileNumel];
};

// Elements of the stretch that are in the tile.
struct Place {
  int64_t begin = 0;
  int64_t numel = 0;
};

ZEROPAGE_ELEMENT void widen_all(const BFloat16Bits* from, float* to, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) to[i] = to_float(from[i]);
}
ZEROPAGE_ELEMENT void join_all(const BFloat16Bits* high, const uint16_t* low, float* to,
                               int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) to[i] = joined(high[i], low[i]);
}
ZEROPAGE_ELEMENT void split_all(const float* from, BFloat16Bits* high, uint16_t* low,
                                int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    const SplitValue both = split(from[i]);
    high[i] = both.high;
    low[i] = both.low;
  }
}

template <typename Low>
ZEROPAGE_ELEMENT void narrow_all(const float* from, Low* to, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) assign(to[i], from[i]);
}

// All of them in a set of instructions.
struct Conversions {
  void (*widen)(const BFloat16Bits* from, float* to, int64_t numel);
  void (*join)(const BFloat16Bits* high, const uint16_t* low, float* to, int64_t numel);
  void (*split)(const float* from, BFloat16Bits* high, uint16_t* low, int64_t numel);
  void (*to_bf16)(const float* from, BFloat16Bits* to, int64_t numel);
  void (*to_half)(const float* from, HalfBits* to, int64_t numel);
};

constexpr Conversions kOnAnyProcessor = {
    .widen = [](auto... arguments) { widen_all(arguments...); },
    .join = [](auto... arguments) { join_all(arguments...); },
    .split = [](auto... arguments) { split_all(arguments...); },
    .to_bf16 = [](auto... arguments) { narrow_all(arguments...); },
    .to_half = [](auto... arguments) { narrow_all(arguments...); }};
constexpr Conversions kWithAvx2 = {
    .widen = [](auto... arguments) ZEROPAGE_AVX2 { widen_all(arguments...); },
    .join = [](auto... arguments) ZEROPAGE_AVX2 { join_all(arguments...); },
    .split = [](auto... arguments) ZEROPAGE_AVX2 { split_all(arguments...); },
    .to_bf16 = [](auto... arguments) ZEROPAGE_AVX2 { narrow_all(arguments...); },
    .to_half = [](auto... arguments) ZEROPAGE_AVX2 { narrow_all(arguments...); }};
constexpr Conversions kWithAvx512 = {
    .widen = [](auto... arguments) ZEROPAGE_AVX512 { widen_all(arguments...); },
    .join = [](auto... arguments) ZEROPAGE_AVX512 { join_all(arguments...); },
    .split = [](auto... arguments) ZEROPAGE_AVX512 { split_all(arguments...); },
    .to_bf16 = [](auto... arguments) ZEROPAGE_AVX512 { narrow_all(arguments...); },
    .to_half = [](auto... arguments) ZEROPAGE_AVX512 { narrow_all(arguments...); }};

const Conversions& conversions_with(Instructions instructions) {
  switch (instructions) {
    case Instructions::kAvx512:
      return kWithAvx512;
    case Instructions::kAvx2:
      return kWithAvx2;
    case Instructions::kAnyProcessor:
      break;
  }
  return kOnAnyProcessor;
}

int states_of(const UpdateRule& rule) {
  return std::visit([]<typename Rule>(const Rule& /*rule*/) { return Rule::kStates; }, rule);
}

// A part of one buffer, by the size of its elements.
template <typename Pointer>
Pointer* offset_by(Pointer* buffer, int64_t elements, Precision precision) {
  using Byte = std::conditional_t<std::is_const_v<Pointer>, const std::byte, std::byte>;
  const int64_t bytes = precision == Precision::kFloat ? 4 : 2;
  return buffer == nullptr ? nullptr : static_cast<Byte*>(buffer) + elements * bytes;
}

// One thread's work on a stretch.
class PackedLoop {
 public:
  PackedLoop(const UpdateRule& rule, const PackedStretch& stretch, Instructions instructions)
      : rule_(rule),
        stretch_(stretch),
        states_(states_of(rule)),
        instructions_(usable(instructions)),
        convert_(conversions_with(instructions_)) {}

  void step(const Place& place) {
    if (is_split()) {
      convert_.join(stretch_.high + place.begin, stretch_.low + place.begin, tile_.values,
                    place.numel);
    }
    if (stretch_.format == StateFormat::k8Bit) {
      step_codes(place);
    } else {
      for (int state = 0; state < states_; ++state) unpack(state, place);
      fused_step(rule_, fp32_of(place), 0, place.numel, instructions_);
      for (int state = 0; state < states_; ++state) pack(state, place);
    }
    if (is_split()) {
      convert_.split(tile_.values, stretch_.high + place.begin, stretch_.low + place.begin,
                     place.numel);
    }
  }

 private:
  bool is_split() const { return stretch_.high != nullptr; }

  // In one pass, and what a fused step does besides.
  void step_codes(const Place& place) {
    const FlatStretch flat = fp32_of(place);
    if (flat.adopts_copy) adopt_copy(flat, 0, place.numel, instructions_);
    const int64_t first = stretch_.first_in_block + place.begin;
    QuantisedStretch all{.values = flat.values,
                         .gradient = flat.gradient,
                         .gradient_precision = flat.gradient_precision,
                         .gradient_scale = flat.gradient_scale,
                         .first_in_block = first % kStateBlockNumel,
                         .numel = place.numel};
    for (int state = 0; state < states_; ++state) {
      all.codes[state] = elements<uint8_t>(state, place);
      all.scales[state] = stretch_.scales[state] + first / kStateBlockNumel;
    }
    quantised_loops(instructions_).step(rule_, all);
    if (flat.gradient_to_zero != nullptr) {
      const size_t bytes = flat.gradient_precision == Precision::kFloat ? 4 : 2;
      std::memset(flat.gradient_to_zero, 0, static_cast<size_t>(place.numel) * bytes);
    }
    if (flat.copy_out == nullptr) return;
    if (flat.copy_precision == Precision::kBFloat16) {
      convert_.to_bf16(flat.values, static_cast<BFloat16Bits*>(flat.copy_out), place.numel);
    } else {
      convert_.to_half(flat.values, static_cast<HalfBits*>(flat.copy_out), place.numel);
    }
  }

  template <typename Element>
  Element* elements(int state, const Place& place) const {
    return static_cast<Element*>(stretch_.states[state]) + place.begin;
  }

  // The tile as a stretch. Where a buffer is fp32 already, it is stepped where it lies.
  FlatStretch fp32_of(const Place& place) {
    FlatStretch flat = stretch_.flat;
    flat.values = is_split() ? tile_.values : flat.values + place.begin;
    flat.gradient = offset_by(flat.gradient, place.begin, flat.gradient_precision);
    flat.gradient_to_zero = offset_by(flat.gradient_to_zero, place.begin, flat.gradient_precision);
    flat.copy_out = offset_by(flat.copy_out, place.begin, flat.copy_precision);
    for (int state = 0; state < states_; ++state) {
      flat.states[state] = stretch_.format == StateFormat::kFp32 ? elements<float>(state, place)
                                                                 : tile_.states[state];
    }
    flat.numel = place.numel;
    flat.found_inf = nullptr;
    return flat;
  }

  void unpack(int state, const Place& place) {
    if (stretch_.format != StateFormat::kBf16) return;
    convert_.widen(elements<BFloat16Bits>(state, place), tile_.states[state], place.numel);
  }

  void pack(int state, const Place& place) {
    if (stretch_.format != StateFormat::kBf16) return;
    round_stochastically(tile_.states[state], elements<BFloat16Bits>(state, place), place.numel,
                         place_of_state(stretch_, state, place.begin), instructions_);
  }

  const UpdateRule& rule_;
  const PackedStretch& stretch_;
  const int states_;
  const Instructions instructions_;
  const Conversions& convert_;
  Tile tile_;
};

}  // namespace

void packed_step(const UpdateRule& rule, const PackedStretch& stretch, int64_t begin, int64_t end,
                 Instructions instructions) {
  const float* const found_inf = stretch.flat.found_inf;
  // There is a gradient to zero, at most.
  if (found_inf != nullptr && *found_inf != 0.0F) {
    return fused_step(rule, stretch.flat, begin, end, instructions);
  }
  PackedLoop loop(rule, stretch, instructions);
  const bool is_in_place = stretch.format == StateFormat::k8Bit && stretch.high == nullptr;
  const int64_t tile_numel = is_in_place ? kTileOfCodesNumel : kTileNumel;
  while (begin < end) {
    const int64_t in_tile = (stretch.first_in_block + begin) % tile_numel;
    int64_t numel = std::min(tile_numel - in_tile, end - begin);
    // What is left of a block is a tile of its own.
    const int64_t in_block = in_tile % kStateBlockNumel;
    if (in_block != 0) {
      numel = std::min(kStateBlockNumel - in_block, numel);
    } else if (numel > kStateBlockNumel) {
      numel -= numel % kStateBlockNumel;
    }
    loop.step({begin, numel});
    begin += numel;
  }
}

}  // namespace zeropage::optim::cpu

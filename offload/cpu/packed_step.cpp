#include "offload/cpu/packed_step.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <variant>

#include "offload/cpu/fused_step.h"
#include "offload/cpu/quantised_block.h"
#include "offload/cpu/quantised_step.h"
#include "offload/cpu/stochastic_rounding.h"

namespace zeropage::offload::cpu {
namespace {

// Eight blocks: their values, gradient and states in fp32 are a first-level cache.
constexpr int64_t kTileNumel = 8 * kStateBlockNumel;

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

// What the rule keeps: how many states, and how many of them, which come first, have a sign.
struct States {
  int count = 0;
  int with_sign = 0;

  StateSign sign(int state) const {
    return state < with_sign ? StateSign::kSigned : StateSign::kUnsigned;
  }
};

States states_of(const UpdateRule& rule) {
  return std::visit(
      []<typename Rule>(const Rule& /*rule*/) {
        return States{Rule::kStates, Rule::kSignedStates};
      },
      rule);
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
    if (is_whole_blocks(place)) {
      step_blocks(place);
    } else {
      for (int state = 0; state < states_.count; ++state) unpack(state, place);
      fused_step(rule_, fp32_of(place), 0, place.numel, instructions_);
      for (int state = 0; state < states_.count; ++state) pack(state, place);
    }
    if (is_split()) {
      convert_.split(tile_.values, stretch_.high + place.begin, stretch_.low + place.begin,
                     place.numel);
    }
  }

 private:
  bool is_split() const { return stretch_.high != nullptr; }

  bool is_whole_blocks(const Place& place) const {
    return stretch_.format == StateFormat::k8Bit && instructions_ == Instructions::kAvx512 &&
           (stretch_.first_in_block + place.begin) % kStateBlockNumel == 0 &&
           place.numel % kStateBlockNumel == 0;
  }

  // In one pass, and what a fused step does besides.
  void step_blocks(const Place& place) {
    const FlatStretch flat = fp32_of(place);
    if (flat.adopts_copy) adopt_copy(flat, 0, place.numel, instructions_);
    QuantisedBlocks all{.values = flat.values,
                        .gradient = flat.gradient,
                        .gradient_precision = flat.gradient_precision,
                        .gradient_scale = flat.gradient_scale,
                        .blocks = place.numel / kStateBlockNumel};
    const int64_t first = (stretch_.first_in_block + place.begin) / kStateBlockNumel;
    for (int state = 0; state < states_.count; ++state) {
      all.codes[state] = elements<uint8_t>(state, place);
      all.scales[state] = stretch_.scales[state] + first;
    }
    step_blocks_with_avx512(rule_, all);
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
    for (int state = 0; state < states_.count; ++state) {
      flat.states[state] = stretch_.format == StateFormat::kFp32 ? elements<float>(state, place)
                                                                 : tile_.states[state];
    }
    flat.numel = place.numel;
    flat.found_inf = nullptr;
    return flat;
  }

  void unpack(int state, const Place& place) {
    float* const to = tile_.states[state];
    if (stretch_.format == StateFormat::kBf16) {
      convert_.widen(elements<BFloat16Bits>(state, place), to, place.numel);
    } else if (stretch_.format == StateFormat::k8Bit) {
      for_each_block(place, [&](int64_t begin, int64_t numel, int64_t block) {
        dequantise(states_.sign(state), elements<uint8_t>(state, place) + begin,
                   stretch_.scales[state][block], to + begin, numel, instructions_);
      });
    }
  }

  void pack(int state, const Place& place) {
    const float* const from = tile_.states[state];
    if (stretch_.format == StateFormat::kBf16) {
      round_stochastically(from, elements<BFloat16Bits>(state, place), place.numel,
                           place_of_state(stretch_, state, place.begin), instructions_);
    } else if (stretch_.format == StateFormat::k8Bit) {
      for_each_block(place, [&](int64_t begin, int64_t numel, int64_t block) {
        stretch_.scales[state][block] =
            quantise(states_.sign(state), from + begin, elements<uint8_t>(state, place) + begin,
                     numel, instructions_);
      });
    }
  }

  // Calls visit(first element within the tile, numel, index of the block in the stretch).
  template <typename Visit>
  void for_each_block(const Place& place, Visit visit) const {
    const int64_t first = stretch_.first_in_block + place.begin;
    for (int64_t begin = 0; begin < place.numel;) {
      const int64_t block = (first + begin) / kStateBlockNumel;
      const int64_t numel =
          std::min((block + 1) * kStateBlockNumel - (first + begin), place.numel - begin);
      visit(begin, numel, block);
      begin += numel;
    }
  }

  const UpdateRule& rule_;
  const PackedStretch& stretch_;
  const States states_;
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
  while (begin < end) {
    const int64_t in_tile = (stretch.first_in_block + begin) % kTileNumel;
    int64_t numel = std::min(kTileNumel - in_tile, end - begin);
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

}  // namespace zeropage::offload::cpu

// The loops over 8-bit states, written once and compiled for each set of instructions: by a source that
// defines, before it includes this, ZEROPAGE_SET, the attribute of the set's functions, and Groups, which
// has what the compiler does not find by itself: a group of codes that become numbers and numbers that become
// codes. All else the compiler makes vectors of, as wide as the set has them. Behind it the source includes how a stretch is
// stepped: quantised_passes_text.h or quantised_turns_text.h. Free of torch.
//
//   struct Groups {
//     static constexpr int kNumel;
//     // As dequantised() and quantised() of the map, of kNumel elements.
//     template <StateSign> static void dequantise(const uint8_t* codes, float scale, float* values);
//     template <StateSign> static void quantise(const float* values, float inverse, uint8_t* codes);
//   };
#pragma once

#include <algorithm>
#include <cstring>
#include <variant>

#include "optim/cpu/quantised_loops.h"
#include "zeropage/detail/state_format.h"

// Always inlined, so that nothing between the loops of a block is a call.
#define ZEROPAGE_SET_ELEMENT ZEROPAGE_SET inline __attribute__((always_inline))

namespace zeropage::optim::cpu {
namespace {

template <StateSign kSign>
ZEROPAGE_SET_ELEMENT void dequantise_block(const uint8_t* codes, float scale, float* values,
                                           int64_t numel) {
  int64_t i = 0;
  for (; i + Groups::kNumel <= numel; i += Groups::kNumel) {
    Groups::dequantise<kSign>(codes + i, scale, values + i);
  }
  for (; i < numel; ++i) values[i] = dequantised<kSign>(codes[i], scale);
}

// The largest magnitude_of() a value.
ZEROPAGE_SET_ELEMENT uint32_t largest_magnitude(const float* values, int64_t numel) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < numel; ++i) largest = std::max(largest, magnitude_of(values[i]));
  return largest;
}

// Returns the block's scale. largest: largest_magnitude() of its values.
template <StateSign kSign>
ZEROPAGE_SET_ELEMENT float quantise_block(const float* values, uint32_t largest, uint8_t* codes,
                                          int64_t numel) {
  const BlockScale block = block_scale(largest);
  if (block.inverse == 0) {
    std::memset(codes, 0, static_cast<size_t>(numel));
    return block.scale;
  }
  int64_t i = 0;
  for (; i + Groups::kNumel <= numel; i += Groups::kNumel) {
    Groups::quantise<kSign>(values + i, block.inverse, codes + i);
  }
  for (; i < numel; ++i) codes[i] = quantised<kSign>(values[i], block.inverse);
  return block.scale;
}

// The states of a block between codes and codes.
struct BlockInFp32 {
  alignas(64) float states[kMostStates][kStateBlockNumel];
  uint32_t largest[kMostStates];  // of their magnitudes, once they are updated
};

template <typename Rule, typename Gradient>
ZEROPAGE_SET_ELEMENT void update_block(const Rule& rule, float* values, const Gradient* gradients,
                                       float gradient_scale, int64_t numel, BlockInFp32& block) {
  float* const first = block.states[0];
  float* const second = block.states[1];
  float* const third = block.states[2];
  uint32_t largest[kMostStates] = {};
  ZEROPAGE_NO_OVERLAP
  for (int64_t i = 0; i < numel; ++i) {
    float states[kMostStates] = {};
    if constexpr (Rule::kStates > 0) states[0] = first[i];
    if constexpr (Rule::kStates > 1) states[1] = second[i];
    if constexpr (Rule::kStates > 2) states[2] = third[i];
    const float gradient = optim::rounded::multiply(to_float(gradients[i]), gradient_scale);
    values[i] = rule.apply(values[i], gradient, states);
    if constexpr (Rule::kStates > 0) first[i] = states[0];
    if constexpr (Rule::kStates > 1) second[i] = states[1];
    if constexpr (Rule::kStates > 2) third[i] = states[2];
    // Beside divisions and roots this takes less time than in a loop of its own.
    for (int state = 0; state < Rule::kStates; ++state) {
      largest[state] = std::max(largest[state], magnitude_of(states[state]));
    }
  }
  for (int state = 0; state < Rule::kStates; ++state) block.largest[state] = largest[state];
}

// `numel` elements of a block of the stretch from `first` on.
struct PartOfBlock {
  int64_t block = 0;
  int64_t first = 0;
  int64_t numel = 0;
};

template <typename Rule>
constexpr StateSign sign_of(int state) {
  return state < Rule::kSignedStates ? StateSign::kSigned : StateSign::kUnsigned;
}

template <typename Rule, int kState = 0>
ZEROPAGE_SET_ELEMENT void load_states(const QuantisedStretch& all, const PartOfBlock& part,
                                      BlockInFp32& to) {
  if constexpr (kState < Rule::kStates) {
    dequantise_block<sign_of<Rule>(kState)>(all.codes[kState] + part.first,
                                            all.scales[kState][part.block], to.states[kState],
                                            part.numel);
    load_states<Rule, kState + 1>(all, part, to);
  }
}

template <typename Rule, int kState = 0>
ZEROPAGE_SET_ELEMENT void store_states(const QuantisedStretch& all, const PartOfBlock& part,
                                       const BlockInFp32& from) {
  if constexpr (kState < Rule::kStates) {
    all.scales[kState][part.block] = quantise_block<sign_of<Rule>(kState)>(
        from.states[kState], from.largest[kState], all.codes[kState] + part.first, part.numel);
    store_states<Rule, kState + 1>(all, part, from);
  }
}

// The source's second text defines it.
template <typename Rule, typename Gradient>
ZEROPAGE_SET void step_blocks(const Rule& shared_rule, const QuantisedStretch& all);

constexpr QuantisedLoops kLoopsOfSet = {
    .step =
        [](const UpdateRule& rule, const QuantisedStretch& stretch) {
          std::visit(
              [&]<typename Rule>(const Rule& of_class) {
                visit_precision(stretch.gradient_precision, [&]<typename Gradient>() {
                  step_blocks<Rule, Gradient>(of_class, stretch);
                });
              },
              rule);
        },
    .dequantise =
        [](StateSign sign, const uint8_t* codes, float scale, float* values, int64_t numel)
            ZEROPAGE_SET {
              if (sign == StateSign::kSigned) {
                dequantise_block<StateSign::kSigned>(codes, scale, values, numel);
              } else {
                dequantise_block<StateSign::kUnsigned>(codes, scale, values, numel);
              }
            },
    .quantise =
        [](StateSign sign, const float* values, uint8_t* codes, int64_t numel) ZEROPAGE_SET {
          const uint32_t largest = largest_magnitude(values, numel);
          return sign == StateSign::kSigned
                     ? quantise_block<StateSign::kSigned>(values, largest, codes, numel)
                     : quantise_block<StateSign::kUnsigned>(values, largest, codes, numel);
        }};

}  // namespace
}  // namespace zeropage::optim::cpu

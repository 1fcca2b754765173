#include "offload/cpu/quantised_step.h"

#include <stdexcept>
#include <type_traits>
#include <variant>

#include "offload/cpu/quantised_vectors.h"
#include "offload/state_format.h"

namespace zeropage::offload::cpu {

#if defined(__x86_64__)
namespace {

// Codes that fill a vector.
constexpr int64_t kGroupNumel = 4 * kLanes;

// How far ahead a group is fetched: a page of fp32, where the processor's own fetching stops. The
// arithmetic of a group is too long for the group after it to come in behind it by itself.
constexpr int64_t kAheadNumel = 1024;
constexpr int64_t kCacheLineBytes = 64;

template <typename Rule>
constexpr StateSign sign_of(int state) {
  return state < Rule::kSignedStates ? StateSign::kSigned : StateSign::kUnsigned;
}

// Of one state: a block in fp32 that is updated, and the one before, which becomes codes meanwhile.
// So the divisions and roots of the one and the arithmetic of the other share the processor.
struct TwoBlocks {
  alignas(64) float values[2][kStateBlockNumel];
};

template <StateSign kSign>
ZEROPAGE_AVX512_ELEMENT void quantise_group(const ValuesToCodes<kSign>& convert,
                                            const float* values, uint8_t* codes) {
  const auto of_lanes = [&](int64_t i) ZEROPAGE_AVX512 {
    return convert(_mm512_load_ps(values + i * kLanes));
  };
  const __m512i halves = _mm512_packus_epi16(_mm512_packus_epi32(of_lanes(0), of_lanes(1)),
                                             _mm512_packus_epi32(of_lanes(2), of_lanes(3)));
  // Packing goes by quarters of the vectors.
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(codes, _mm512_permutexvar_epi32(in_order, halves));
}

// A state of the block before.
struct Finished {
  const float* values = nullptr;
  uint8_t* codes = nullptr;
  float inverse = 0;

  template <StateSign kSign>
  ZEROPAGE_AVX512_ELEMENT void quantise(int64_t group) const {
    uint8_t* const to = codes + group;
    if (inverse == 0) {
      _mm512_storeu_si512(to, _mm512_setzero_si512());
    } else {
      quantise_group(ValuesToCodes<kSign>(inverse), values + group, to);
    }
  }
};

// Calls visit.operator()<state>() for each state of the rule.
template <int kState = 0, int kStates, typename Visit>
ZEROPAGE_AVX512_ELEMENT void for_each_state(std::integral_constant<int, kStates> all,
                                            const Visit& visit) {
  if constexpr (kState < kStates) {
    visit.template operator()<kState>();
    for_each_state<kState + 1>(all, visit);
  }
}

template <typename Element>
ZEROPAGE_AVX512_ELEMENT void fetch_group(const Element* group) {
  constexpr int64_t kLineNumel = kCacheLineBytes / int64_t{sizeof(Element)};
  for (int64_t i = 0; i < kGroupNumel; i += kLineNumel) __builtin_prefetch(group + i);
}

// The states come and go in registers: compiled, the arrays are no memory.
template <typename Rule, typename Gradient>
ZEROPAGE_AVX512_ELEMENT void update_lanes(const Rule& rule, float* values,
                                          const Gradient* gradients, float scale,
                                          __m512 (&states)[kMostStates]) {
  alignas(64) float lanes[kMostStates][kLanes];
  for (int state = 0; state < Rule::kStates; ++state) _mm512_store_ps(lanes[state], states[state]);
  ZEROPAGE_NO_OVERLAP
  for (int64_t i = 0; i < kLanes; ++i) {
    float of_element[kMostStates] = {};
    if constexpr (Rule::kStates > 0) of_element[0] = lanes[0][i];
    if constexpr (Rule::kStates > 1) of_element[1] = lanes[1][i];
    if constexpr (Rule::kStates > 2) of_element[2] = lanes[2][i];
    const float gradient = rounded::multiply(to_float(gradients[i]), scale);
    values[i] = rule.apply(values[i], gradient, of_element);
    if constexpr (Rule::kStates > 0) lanes[0][i] = of_element[0];
    if constexpr (Rule::kStates > 1) lanes[1][i] = of_element[1];
    if constexpr (Rule::kStates > 2) lanes[2][i] = of_element[2];
  }
  for (int state = 0; state < Rule::kStates; ++state) states[state] = _mm512_load_ps(lanes[state]);
}

template <typename Rule, typename Gradient>
ZEROPAGE_AVX512 void step_blocks(const Rule& shared_rule, const QuantisedBlocks& all) {
  constexpr std::integral_constant<int, Rule::kStates> kAllStates;
  const Rule rule = shared_rule;
  const auto* const gradients = static_cast<const Gradient*>(all.gradient);
  TwoBlocks tiles[kMostStates];
  Finished finished[kMostStates];
  const auto quantise_finished = [&](int64_t group) ZEROPAGE_AVX512 {
    for_each_state(kAllStates, [&]<int kState>() ZEROPAGE_AVX512 {
      finished[kState].template quantise<sign_of<Rule>(kState)>(group);
    });
  };
  for (int64_t block = 0; block < all.blocks; ++block) {
    const int64_t first = block * kStateBlockNumel;
    LargestMagnitude largest[kMostStates];
    for (int64_t group = 0; group < kStateBlockNumel; group += kGroupNumel) {
      const int64_t ahead = first + group + kAheadNumel;
      fetch_group(all.values + ahead);
      fetch_group(gradients + ahead);
      for_each_state(kAllStates,
                     [&]<int kState>() ZEROPAGE_AVX512 { fetch_group(all.codes[kState] + ahead); });
      for (int64_t i = group; i < group + kGroupNumel; i += kLanes) {
        __m512 states[kMostStates];
        for_each_state(kAllStates, [&]<int kState>() ZEROPAGE_AVX512 {
          const CodesToValues<sign_of<Rule>(kState)> convert(all.scales[kState][block]);
          const auto* const codes = all.codes[kState] + first + i;
          states[kState] = convert(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
        });
        update_lanes(rule, all.values + first + i, gradients + first + i, all.gradient_scale,
                     states);
        for_each_state(kAllStates, [&]<int kState>() ZEROPAGE_AVX512 {
          _mm512_store_ps(tiles[kState].values[block % 2] + i, states[kState]);
          largest[kState].take(states[kState]);
        });
      }
      if (block > 0) quantise_finished(group);
    }
    for_each_state(kAllStates, [&]<int kState>() ZEROPAGE_AVX512 {
      const BlockScale scale = block_scale(largest[kState].bits());
      all.scales[kState][block] = scale.scale;
      finished[kState] = {tiles[kState].values[block % 2], all.codes[kState] + first,
                          scale.inverse};
    });
  }
  if (all.blocks == 0) return;
  for (int64_t group = 0; group < kStateBlockNumel; group += kGroupNumel) quantise_finished(group);
}

}  // namespace

void step_blocks_with_avx512(const UpdateRule& rule, const QuantisedBlocks& blocks) {
  std::visit(
      [&]<typename Rule>(const Rule& of_class) {
        visit_precision(blocks.gradient_precision, [&]<typename Gradient>() {
          step_blocks<Rule, Gradient>(of_class, blocks);
        });
      },
      rule);
}
#else
void step_blocks_with_avx512(const UpdateRule& /*rule*/, const QuantisedBlocks& /*blocks*/) {
  throw std::logic_error("step_blocks_with_avx512: this processor has no AVX-512");
}
#endif

}  // namespace zeropage::offload::cpu

// Groups of quantised_loops_text.h for sets of instructions of which only the way from bytes to words and back is
// written by hand: the compiler makes vectors of the rest, and words lie in memory between the two. Behind the
// definition of ZEROPAGE_SET. Free of torch.
//
//   struct Words {
//     static constexpr int kNumel;
//     // The same as widened() of the map.
//     template <StateSign> static void widen(const uint8_t* codes, uint32_t* words);
//     // The codes of magnitudes, with the signs of values.
//     template <StateSign> static void narrow(const uint32_t* magnitudes, const float* values, uint8_t* codes);
//   };
#pragma once

#include "optim/cpu/quantised_loops.h"

namespace zeropage::optim::cpu {
namespace {

template <typename Words>
struct GroupsByWords {
  static constexpr int kNumel = Words::kNumel;

  template <StateSign kSign>
  ZEROPAGE_SET inline __attribute__((always_inline)) static void dequantise(const uint8_t* codes,
                                                                            float scale,
                                                                            float* values) {
    alignas(64) uint32_t words[kNumel];
    Words::template widen<kSign>(codes, words);
    ZEROPAGE_NO_OVERLAP
    for (int i = 0; i < kNumel; ++i) values[i] = value_of_widened<kSign>(words[i], scale);
  }

  template <StateSign kSign>
  ZEROPAGE_SET inline __attribute__((always_inline)) static void quantise(const float* values,
                                                                          float inverse,
                                                                          uint8_t* codes) {
    alignas(64) uint32_t magnitudes[kNumel];
    ZEROPAGE_NO_OVERLAP
    for (int i = 0; i < kNumel; ++i) magnitudes[i] = quantised_magnitude<kSign>(values[i], inverse);
    Words::template narrow<kSign>(magnitudes, values, codes);
  }
};

}  // namespace
}  // namespace zeropage::optim::cpu

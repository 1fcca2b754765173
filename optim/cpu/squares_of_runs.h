// Exact sums of the squares of a run, for processors with AVX2: numbers are looked at as they are added,
// and a run that a sum does not take is found out behind it. Elsewhere this header is empty. Free of
// torch.
#pragma once

#if defined(__x86_64__)
#include <algorithm>
#include <immintrin.h>
#include <iterator>
#include <limits>

#include "optim/cpu/instructions.h"
#include "optim/exact_squares.h"

namespace zeropage::optim::cpu {

#define ZEROPAGE_AVX2_ELEMENT ZEROPAGE_AVX2 inline __attribute__((always_inline))

// What a run asks of memory, a line at each turn: the run behind the next. All at once, at the run's beginning, would wait until
// the processor has that many lines under way.
inline constexpr int kPrefetchNumel = 2 * kWindowNumel;

// A run of fp32: registers of four sums, as many as hide how long an addition takes.
inline constexpr int kRegistersOfSums = 4;

// run: [kWindowNumel]. Returns whether the window takes all of it, and so whether `terms` are its sum. Sums
// only rise: those that lie in the window at the end always did.
ZEROPAGE_AVX2_ELEMENT bool sum_in_guessed_window(const float* run, const SquareWindow& window,
                                                 SquareTerms& terms) {
  const __m256d base = _mm256_set1_pd(window.base);
  __m256d highs[kRegistersOfSums];
  __m256d lows[kRegistersOfSums];
  for (int k = 0; k < kRegistersOfSums; ++k) {
    highs[k] = base;
    lows[k] = _mm256_setzero_pd();
  }
  // Keys less 1, so that zeros come last.
  const __m256i magnitude = _mm256_set1_epi32(std::numeric_limits<int32_t>::max());
  __m256i leasts = magnitude;
  for (int i = 0; i < kWindowNumel; i += 4 * kRegistersOfSums) {
    __builtin_prefetch(run + i + kPrefetchNumel);
    for (int k = 0; k < kRegistersOfSums; ++k) {
      const __m256d wide = _mm256_cvtps_pd(_mm_loadu_ps(run + i + 4 * k));
      const __m256d sum = _mm256_fmadd_pd(wide, wide, highs[k]);
      const __m256d taken = _mm256_sub_pd(sum, highs[k]);
      lows[k] = _mm256_add_pd(lows[k], _mm256_fmsub_pd(wide, wide, taken));
      highs[k] = sum;
    }
    for (int k = 0; k < kRegistersOfSums; k += 2) {
      const auto* const from = reinterpret_cast<const __m256i*>(run + i + 4 * k);
      const __m256i key = _mm256_and_si256(_mm256_loadu_si256(from), magnitude);
      leasts = _mm256_min_epi32(leasts, _mm256_add_epi32(key, magnitude));
    }
  }
  __m256d high = _mm256_setzero_pd();
  __m256d low = _mm256_setzero_pd();
  for (int k = 0; k < kRegistersOfSums; ++k) {
    high = _mm256_add_pd(high, _mm256_sub_pd(highs[k], base));
    low = _mm256_add_pd(low, lows[k]);
  }
  alignas(32) double lanes_high[4];
  alignas(32) double lanes_low[4];
  alignas(32) int32_t lanes_least[8];
  _mm256_store_pd(lanes_high, high);
  _mm256_store_pd(lanes_low, low);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes_least), leasts);
  const int32_t least = *std::min_element(std::begin(lanes_least), std::end(lanes_least));
  const double sum_high = lanes_high[0] + lanes_high[1] + lanes_high[2] + lanes_high[3];
  const double sum_low = lanes_low[0] + lanes_low[1] + lanes_low[2] + lanes_low[3];
  if (!(sum_high < window.base)) return false;  // a NaN is not
  if (least < static_cast<int32_t>(window.least_key + 0x7fffffffU)) return false;
  terms = terms_of(sum_high, sum_low, window.unit);
  return true;
}

// Sums of squares of bf16 numbers side by side, and what a sum must be below to be exact.
struct SumsOfBf16 {
  static constexpr int kSums = 16;
  alignas(32) double sums[kSums];
  double end = 0;  // 0: all numbers are zeros
};

// The sums, and to each of them the square of a number in fp32.
ZEROPAGE_AVX2_ELEMENT __m256d with_squares(__m128i numbers, __m256d sums) {
  const __m256d wide = _mm256_cvtps_pd(_mm_castsi128_ps(numbers));
  return _mm256_fmadd_pd(wide, wide, sums);
}

// run: [kWindowNumel]. Squares of bf16 have 16 bits, so no sum is split: it is exact while it is below 2^53
// times what all of its terms are multiples of. Two elements are a word, and either half of it is a number in
// fp32 where the other half is zero.
ZEROPAGE_AVX2_ELEMENT SumsOfBf16 sums_of_squares(const BFloat16Bits* run) {
  constexpr int kRegisters = SumsOfBf16::kSums / 4;
  __m256d sums[kRegisters];
  for (auto& sum : sums) sum = _mm256_setzero_pd();
  const __m128i upper_half = _mm_set1_epi32(static_cast<int>(0xffff0000U));
  const __m256i magnitude = _mm256_set1_epi16(std::numeric_limits<int16_t>::max());
  __m256i leasts = magnitude;
  for (int i = 0; i < kWindowNumel; i += SumsOfBf16::kSums) {
    const auto* const from = reinterpret_cast<const __m128i*>(run + i);
    __builtin_prefetch(run + i + kPrefetchNumel);
    for (int half = 0; half < 2; ++half) {
      const __m128i words = _mm_loadu_si128(from + half);
      sums[2 * half] = with_squares(_mm_slli_epi32(words, 16), sums[2 * half]);
      sums[2 * half + 1] = with_squares(_mm_and_si128(words, upper_half), sums[2 * half + 1]);
    }
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i key = _mm256_and_si256(bits, magnitude);
    leasts = _mm256_min_epi16(leasts, _mm256_add_epi16(key, magnitude));
  }
  SumsOfBf16 made;
  for (int k = 0; k < kRegisters; ++k) _mm256_store_pd(made.sums + 4 * k, sums[k]);
  alignas(32) int16_t lanes[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), leasts);
  const int least = *std::min_element(std::begin(lanes), std::end(lanes));
  if (least == std::numeric_limits<int16_t>::max()) return made;
  constexpr int kFractionBits = kSignificantBits<BFloat16Bits> - 1;
  const int key = least + 0x8001;  // less 0x7fff, without a sign
  const int exponent = std::max(key >> kFractionBits, 1) - 127;
  made.end = power_of_two(53 + 2 * (exponent - kFractionBits));
  return made;
}

}  // namespace zeropage::optim::cpu
#endif

#include "optim/cpu/quantised_loops.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define ZEROPAGE_SET ZEROPAGE_AVX512
#define ZEROPAGE_INTRINSICS ZEROPAGE_AVX512 inline __attribute__((always_inline))

namespace zeropage::optim::cpu {
namespace {

// A group is a register, and stays one between its codes and its numbers: what the compiler makes of a loop over so few
// elements goes through memory.
struct Groups {
  static constexpr int kNumel = 16;
  using Lanes = __m512i;

  template <StateSign kSign>
  ZEROPAGE_INTRINSICS static void dequantise(const uint8_t* codes, float scale, float* values) {
    constexpr bool kHasSigns = kSign == StateSign::kSigned;
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m512i words = kHasSigns ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
    const __m512i magnitude = kHasSigns ? _mm512_and_si512(words, each(kTopCode<kSign>)) : words;
    const __m512i units = _mm512_or_si512(magnitude, each(optim::detail::kBitsOfCode0<kSign>));
    const __m512 level = _mm512_add_ps(_mm512_castsi512_ps(units),
                                       _mm512_set1_ps(optim::detail::kLevelOfCode0<kSign>));
    const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(level), 2);
    const __m512 value = _mm512_fmadd_ps(
        _mm512_castsi512_ps(power), _mm512_set1_ps(optim::rounded::multiply(scale, 0.5F)),
        _mm512_set1_ps(optim::rounded::multiply(scale, -0.5F * optim::detail::kLeastPower<kSign>)));
    __m512i bits = _mm512_castps_si512(value);
    if constexpr (kHasSigns) {
      bits = _mm512_ternarylogic_epi32(bits, words, each(0x80000000U), kOrSecondAndThird);
    }
    _mm512_storeu_si512(values, bits);
  }

  template <StateSign kSign>
  ZEROPAGE_INTRINSICS static void quantise(const float* values, float inverse, uint8_t* codes) {
    constexpr bool kHasSigns = kSign == StateSign::kSigned;
    const __m512i bits = load(values);
    const __m512i magnitude = kHasSigns ? magnitudes_of(values) : bits;
    const __m512 power = _mm512_fmadd_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(inverse),
                                         _mm512_set1_ps(optim::detail::kLeastPower<kSign>));
    const __m512i level = _mm512_srli_epi32(_mm512_castps_si512(power), 2);
    __m512i words = _mm512_castps_si512(
        _mm512_add_ps(_mm512_castsi512_ps(level), _mm512_set1_ps(optim::detail::kToCode<kSign>)));
    if constexpr (kHasSigns) {
      words = _mm512_ternarylogic_epi32(words, _mm512_srli_epi32(bits, 24), each(0x80U),
                                        kOrSecondAndThird);
    }
    // It takes the last byte of each.
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(words));
  }

  ZEROPAGE_INTRINSICS static Lanes fold(Lanes lanes, const float* values) {
    return _mm512_max_epu32(lanes, magnitudes_of(values));
  }
  ZEROPAGE_INTRINSICS static uint32_t largest(Lanes lanes) {
    return _mm512_reduce_max_epu32(lanes);
  }

 private:
  static constexpr int kOrSecondAndThird = 0xf8;  // first | (second & third)

  ZEROPAGE_INTRINSICS static __m512i load(const void* from) { return _mm512_loadu_si512(from); }
  ZEROPAGE_INTRINSICS static __m512i each(uint32_t word) {
    return _mm512_set1_epi32(static_cast<int>(word));
  }
  ZEROPAGE_INTRINSICS static __m512i magnitudes_of(const float* values) {
    return _mm512_and_si512(load(values), each(0x7fffffffU));
  }
};

}  // namespace
}  // namespace zeropage::optim::cpu

#include "optim/cpu/quantised_loops_text.h"
#include "optim/cpu/quantised_turns_text.h"

namespace zeropage::optim::cpu {

const QuantisedLoops kQuantisedLoopsWithAvx512 = kLoopsOfSet;

}  // namespace zeropage::optim::cpu
#endif

// 16 elements of an 8-bit state at once, with the bits of offload/quantisation_map.h: what its lines
// are to a number, a permutation of lanes looks up. Where there is no AVX-512 this header is empty.
#pragma once

#if defined(__x86_64__)
#include <array>
#include <cstdint>
#include <immintrin.h>

#include "offload/cpu/instructions.h"
#include "offload/quantisation_map.h"

namespace zeropage::offload::cpu {

#define ZEROPAGE_AVX512_ELEMENT ZEROPAGE_AVX512 inline __attribute__((always_inline))

inline constexpr int64_t kLanes = 16;
inline constexpr int kOrWhereThird = 0xf8;  // of vpternlog: first | (second & third)

struct Lines {
  alignas(64) std::array<float, kLanes> slopes;
  alignas(64) std::array<float, kLanes> offsets;
};

// By the last four bits of the exponent of code + 0.5. That of code 0 has none of a decade's, and
// finds zeros.
template <StateSign kSign>
constexpr Lines lines_by_code() {
  constexpr uint32_t kExponentBias = 127;
  Lines lines{};
  for (int decade = 0; decade < kDecades<kSign>; ++decade) {
    const size_t at = (kExponentBias + static_cast<uint32_t>(decade)) % kLanes;
    lines.slopes[at] = detail::value_slope(kDecades<kSign>, decade);
    lines.offsets[at] = detail::value_offset(kDecades<kSign>, decade);
  }
  return lines;
}

// By the last four bits of half the exponent: 16 ranges of a factor of 4 from 2^-31 on. In none is
// there more than one end of a decade, so one of the lines at its ends is the smallest of all.
enum class End : uint8_t { kLower, kUpper };
template <StateSign kSign>
constexpr Lines lines_by_value(End end) {
  Lines lines{};
  double value = end == End::kLower ? kLeastRelative : 4 * kLeastRelative;
  for (size_t range = 0; range < kLanes; ++range, value *= 4) {
    int decade = 0;
    while (decade + 1 < kDecades<kSign> && value > detail::end_of_decade(kDecades<kSign>, decade)) {
      ++decade;
    }
    lines.slopes[range] = detail::code_slope(kDecades<kSign>, decade);
    lines.offsets[range] = detail::code_offset(decade);
  }
  return lines;
}

template <StateSign kSign>
class CodesToValues {
 public:
  ZEROPAGE_AVX512_ELEMENT explicit CodesToValues(float scale) : scales_(_mm512_set1_ps(scale)) {}

  ZEROPAGE_AVX512_ELEMENT __m512 operator()(__m128i codes) const {
    const __m512 slopes = _mm512_load_ps(kLines.slopes.data());
    const __m512 offsets = _mm512_load_ps(kLines.offsets.data());
    constexpr bool kHasSign = kSign == StateSign::kSigned;
    const __m512i code = kHasSign ? _mm512_cvtepi8_epi32(codes) : _mm512_cvtepu8_epi32(codes);
    // The bits of 2^23, or-ed with an integer, are 2^23 and that integer.
    const __m512i exact = _mm512_set1_epi32(0x4b000000);
    const __m512i top = _mm512_set1_epi32(static_cast<int>(kTopCode<kSign>));
    const __m512i above = kHasSign ? _mm512_ternarylogic_epi32(exact, code, top, kOrWhereThird)
                                   : _mm512_or_epi32(exact, code);
    const __m512 middle = _mm512_sub_ps(_mm512_castsi512_ps(above), _mm512_set1_ps(0x1p23F - 0.5F));
    const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(middle), 23);
    const __m512 relative = _mm512_fmadd_ps(middle, _mm512_permutexvar_ps(exponent, slopes),
                                            _mm512_permutexvar_ps(exponent, offsets));
    const __m512 value = _mm512_mul_ps(relative, scales_);
    if constexpr (!kHasSign) return value;
    const __m512i sign_bit = _mm512_set1_epi32(static_cast<int>(0x80000000U));
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(_mm512_castps_si512(value), code, sign_bit, kOrWhereThird));
  }

 private:
  static constexpr Lines kLines = lines_by_code<kSign>();
  const __m512 scales_;
};

template <StateSign kSign>
class ValuesToCodes {
 public:
  ZEROPAGE_AVX512_ELEMENT explicit ValuesToCodes(float inverse)
      : inverses_(_mm512_set1_ps(inverse)) {}

  // A code in each 32 bits.
  ZEROPAGE_AVX512_ELEMENT __m512i operator()(__m512 values) const {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i magnitude_bits = _mm512_set1_epi32(0x7fffffff);
    const __m512 magnitude = kSign == StateSign::kSigned
                                 ? _mm512_castsi512_ps(_mm512_and_epi32(bits, magnitude_bits))
                                 : values;
    const __m512 relative = _mm512_fmadd_ps(magnitude, inverses_, _mm512_set1_ps(kLeastRelative));
    const __m512i range = _mm512_srli_epi32(_mm512_castps_si512(relative), 24);
    const __m512i code = _mm512_cvttps_epi32(
        _mm512_min_ps(line(kLower, range, relative), line(kUpper, range, relative)));
    if constexpr (kSign == StateSign::kUnsigned) return code;
    return _mm512_ternarylogic_epi32(code, _mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80),
                                     kOrWhereThird);
  }

 private:
  static constexpr Lines kLower = lines_by_value<kSign>(End::kLower);
  static constexpr Lines kUpper = lines_by_value<kSign>(End::kUpper);

  ZEROPAGE_AVX512_ELEMENT static __m512 line(const Lines& lines, __m512i range, __m512 relative) {
    const __m512 slopes = _mm512_load_ps(lines.slopes.data());
    const __m512 offsets = _mm512_load_ps(lines.offsets.data());
    return _mm512_fmadd_ps(relative, _mm512_permutexvar_ps(range, slopes),
                           _mm512_permutexvar_ps(range, offsets));
  }

  const __m512 inverses_;
};

class LargestMagnitude {
 public:
  ZEROPAGE_AVX512_ELEMENT LargestMagnitude() : largest_(_mm512_setzero_si512()) {}

  ZEROPAGE_AVX512_ELEMENT void take(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    largest_ = _mm512_max_epu32(largest_, _mm512_and_epi32(bits, _mm512_set1_epi32(0x7fffffff)));
  }
  ZEROPAGE_AVX512_ELEMENT uint32_t bits() const { return _mm512_reduce_max_epu32(largest_); }

 private:
  __m512i largest_;
};

}  // namespace zeropage::offload::cpu
#endif

#include "offload/cpu/quantised_block.h"

#include <cstring>

#include "offload/cpu/quantised_vectors.h"

namespace zeropage::offload::cpu {
namespace {

ZEROPAGE_ELEMENT uint32_t largest_magnitude(const float* values, int64_t numel) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t magnitude = magnitude_of(values[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

template <StateSign kSign>
ZEROPAGE_ELEMENT void dequantise_all(const uint8_t* codes, float scale, float* values,
                                     int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) values[i] = dequantised<kSign>(codes[i], scale);
}

template <StateSign kSign>
ZEROPAGE_ELEMENT float quantise_all(const float* values, uint8_t* codes, int64_t numel) {
  const BlockScale block = block_scale(largest_magnitude(values, numel));
  if (block.inverse == 0) {
    std::memset(codes, 0, static_cast<size_t>(numel));
    return block.scale;
  }
  for (int64_t i = 0; i < numel; ++i) codes[i] = quantised<kSign>(values[i], block.inverse);
  return block.scale;
}

template <StateSign kSign>
void dequantise_on_any_processor(const uint8_t* codes, float scale, float* values, int64_t numel) {
  dequantise_all<kSign>(codes, scale, values, numel);
}
template <StateSign kSign>
float quantise_on_any_processor(const float* values, uint8_t* codes, int64_t numel) {
  return quantise_all<kSign>(values, codes, numel);
}

template <StateSign kSign>
ZEROPAGE_AVX2 void dequantise_with_avx2(const uint8_t* codes, float scale, float* values,
                                        int64_t numel) {
  dequantise_all<kSign>(codes, scale, values, numel);
}
template <StateSign kSign>
ZEROPAGE_AVX2 float quantise_with_avx2(const float* values, uint8_t* codes, int64_t numel) {
  return quantise_all<kSign>(values, codes, numel);
}

#if defined(__x86_64__)
ZEROPAGE_AVX512 __mmask16 lanes_left(int64_t numel) {
  return static_cast<__mmask16>((1U << numel) - 1);
}

template <StateSign kSign>
ZEROPAGE_AVX512 void dequantise_with_avx512(const uint8_t* codes, float scale, float* values,
                                            int64_t numel) {
  const CodesToValues<kSign> convert(scale);
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    const __m128i of_lanes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
    _mm512_storeu_ps(values + i, convert(of_lanes));
  }
  if (i == numel) return;
  const __mmask16 lanes = lanes_left(numel - i);
  _mm512_mask_storeu_ps(values + i, lanes, convert(_mm_maskz_loadu_epi8(lanes, codes + i)));
}

ZEROPAGE_AVX512 uint32_t largest_magnitude_with_avx512(const float* values, int64_t numel) {
  LargestMagnitude largest;
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) largest.take(_mm512_loadu_ps(values + i));
  if (i < numel) largest.take(_mm512_maskz_loadu_ps(lanes_left(numel - i), values + i));
  return largest.bits();
}

template <StateSign kSign>
ZEROPAGE_AVX512 float quantise_with_avx512(const float* values, uint8_t* codes, int64_t numel) {
  const BlockScale block = block_scale(largest_magnitude_with_avx512(values, numel));
  if (block.inverse == 0) {
    std::memset(codes, 0, static_cast<size_t>(numel));
    return block.scale;
  }
  const ValuesToCodes<kSign> convert(block.inverse);
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i),
                     _mm512_cvtepi32_epi8(convert(_mm512_loadu_ps(values + i))));
  }
  if (i < numel) {
    const __mmask16 lanes = lanes_left(numel - i);
    const __m512 of_lanes = _mm512_maskz_loadu_ps(lanes, values + i);
    _mm_mask_storeu_epi8(codes + i, lanes, _mm512_cvtepi32_epi8(convert(of_lanes)));
  }
  return block.scale;
}
#endif

// Calls visit.operator()<kSign>().
template <typename Visit>
auto visit_sign(StateSign sign, Visit visit) {
  return sign == StateSign::kSigned ? visit.template operator()<StateSign::kSigned>()
                                    : visit.template operator()<StateSign::kUnsigned>();
}

}  // namespace

void dequantise(StateSign sign, const uint8_t* codes, float scale, float* values, int64_t numel,
                Instructions instructions) {
  visit_sign(sign, [&]<StateSign kSign>() {
    switch (usable(instructions)) {
      case Instructions::kAvx512:
#if defined(__x86_64__)
        return dequantise_with_avx512<kSign>(codes, scale, values, numel);
#endif
      case Instructions::kAvx2:
        return dequantise_with_avx2<kSign>(codes, scale, values, numel);
      case Instructions::kAnyProcessor:
        break;
    }
    return dequantise_on_any_processor<kSign>(codes, scale, values, numel);
  });
}

float quantise(StateSign sign, const float* values, uint8_t* codes, int64_t numel,
               Instructions instructions) {
  return visit_sign(sign, [&]<StateSign kSign>() {
    switch (usable(instructions)) {
      case Instructions::kAvx512:
#if defined(__x86_64__)
        return quantise_with_avx512<kSign>(values, codes, numel);
#endif
      case Instructions::kAvx2:
        return quantise_with_avx2<kSign>(values, codes, numel);
      case Instructions::kAnyProcessor:
        break;
    }
    return quantise_on_any_processor<kSign>(values, codes, numel);
  });
}

}  // namespace zeropage::offload::cpu

// A state in 8 bits: the numbers of a block as codes, relative to the block's largest magnitude,
// which is its scale (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization",
// arXiv:2110.02861, section 2: dynamic tree quantisation). Free of torch and of CUDA.
//
// Relative magnitudes from 10^-7 to 1 (10^-8 to 1 where there is no sign) are cut into decades, and
// decade d, the lowest being 0, into 2^d bins of one width. Code 2^d + k is the middle of bin k; what
// is below all bins is code 0, which is zero. The sign is the code's bit 7. The map is divided by
// the top code's value, so that the largest number of a block is that code and stays exactly what it
// is: otherwise the largest would shrink with every step.
//
// A number so differs from its code's by at most half a bin: 0.45 / 2^d of its decade's top, which is
// 4.5 / 2^d of the number at most, and 1 / 140 or 1 / 280 of a block's largest anywhere.
//
// Values over codes are lines, steeper from decade to decade, that meet where decades do: a convex
// function, the largest of its lines; and codes over values are the smallest of theirs. That is
// how both are computed, without a branch or a table.
//
// A block with an infinity or a NaN gets a NaN as its scale, and all of it is NaN from then on; other
// blocks are not touched. One whose largest is below 2^-126 becomes zero.
#pragma once

#include <utility>

#include "offload/rounded.h"

namespace zeropage::offload {

enum class StateSign : uint8_t {
  kSigned,    // means: 7 decades, and a sign
  kUnsigned,  // sums and means of squares: 8 decades
};

template <StateSign kSign>
inline constexpr int kDecades = kSign == StateSign::kSigned ? 7 : 8;
template <StateSign kSign>
inline constexpr uint32_t kTopCode = (1U << kDecades<kSign>)-1;

namespace detail {

constexpr double two_to(int n) {
  return n < 0 ? 1 / static_cast<double>(1U << -n) : static_cast<double>(1U << n);
}

// The upper end of a decade of `decades`, where the top code's value is 1.
constexpr double end_of_decade(int decades, int decade) {
  double end = 1 / (0.1 + 0.9 * (1 - two_to(-decades)));
  for (int above = decade + 1; above < decades; ++above) end /= 10;
  return end;
}

// Value = slope (code + 0.5) + offset. With that offset the top code's value is 1 in fp32 too.
constexpr float value_slope(int decades, int decade) {
  return static_cast<float>(0.9 * end_of_decade(decades, decade) / two_to(decade));
}
constexpr float value_offset(int decades, int decade) {
  const double last = end_of_decade(decades, decade) * (0.1 + 0.9 * (1 - two_to(-decade - 1)));
  return static_cast<float>(last - (two_to(decade + 1) - 0.5) *
                                       static_cast<double>(value_slope(decades, decade)));
}

// Code = slope value + offset, without its fraction.
constexpr float code_slope(int decades, int decade) {
  return static_cast<float>(two_to(decade) / (0.9 * end_of_decade(decades, decade)));
}
constexpr float code_offset(int decade) {
  return static_cast<float>(two_to(decade) * 8 / 9);
}

template <int kDecades, int kDecade>
inline constexpr float kValueSlope = value_slope(kDecades, kDecade);
template <int kDecades, int kDecade>
inline constexpr float kValueOffset = value_offset(kDecades, kDecade);
template <int kDecades, int kDecade>
inline constexpr float kCodeSlope = code_slope(kDecades, kDecade);
template <int kDecade>
inline constexpr float kCodeOffset = code_offset(kDecade);

template <int kDecades>
using DecadesFrom0 = std::make_integer_sequence<int, kDecades>;

template <int... kDecade>
ZEROPAGE_ELEMENT float value_of(float code, std::integer_sequence<int, kDecade...> /*all*/) {
  float largest = 0;
  const auto raise = [&largest](float line) { largest = line > largest ? line : largest; };
  (raise(rounded::multiply_add(code, kValueSlope<sizeof...(kDecade), kDecade>,
                               kValueOffset<sizeof...(kDecade), kDecade>)),
   ...);
  return largest;
}

template <int... kDecade>
ZEROPAGE_ELEMENT float code_of(float value, std::integer_sequence<int, kDecade...> /*all*/) {
  float smallest = 256;
  const auto lower = [&smallest](float line) { smallest = line < smallest ? line : smallest; };
  (lower(
       rounded::multiply_add(value, kCodeSlope<sizeof...(kDecade), kDecade>, kCodeOffset<kDecade>)),
   ...);
  return smallest;
}

}  // namespace detail

struct BlockScale {
  float scale;    // what codes are relative to
  float inverse;  // 0: all codes are 0
};

// Of the largest of bits_of() the magnitudes of a block; as integers they are ordered, NaN on top.
ZEROPAGE_ELEMENT BlockScale block_scale(uint32_t largest_magnitude) {
  constexpr uint32_t kLeastNormal = 0x00800000;
  constexpr uint32_t kInfinity = 0x7f800000;
  constexpr uint32_t kNaN = 0x7fc00000;
  if (largest_magnitude < kLeastNormal) return {0, 0};
  if (largest_magnitude >= kInfinity) return {rounded::float_of(kNaN), 0};
  const float scale = rounded::float_of(largest_magnitude);
  return {scale, rounded::divide(1.0F, scale)};
}

ZEROPAGE_ELEMENT uint32_t magnitude_of(float value) {
  return rounded::bits_of(value) & 0x7fffffffU;
}

// Added to relative magnitudes, so that none is so small that it needs a look of its own: far below
// the first bin, and less than half of the last place of the largest.
inline constexpr float kLeastRelative = 0.5F / (uint32_t{1} << 30);

// Of a finite value in a block whose inverse is not 0.
template <StateSign kSign>
ZEROPAGE_ELEMENT uint8_t quantised(float value, float inverse) {
  const float relative =
      rounded::multiply_add(rounded::float_of(magnitude_of(value)), inverse, kLeastRelative);
  const float code = detail::code_of(relative, detail::DecadesFrom0<kDecades<kSign>>());
  const auto magnitude = static_cast<uint32_t>(static_cast<int32_t>(code));
  if constexpr (kSign == StateSign::kUnsigned) return static_cast<uint8_t>(magnitude);
  return static_cast<uint8_t>(magnitude | (rounded::bits_of(value) >> 24 & 0x80U));
}

template <StateSign kSign>
ZEROPAGE_ELEMENT float dequantised(uint8_t code, float scale) {
  const uint32_t magnitude = code & kTopCode<kSign>;
  const float middle = rounded::add(static_cast<float>(static_cast<int32_t>(magnitude)), 0.5F);
  const float relative = detail::value_of(middle, detail::DecadesFrom0<kDecades<kSign>>());
  const float value = rounded::multiply(relative, scale);
  if constexpr (kSign == StateSign::kUnsigned) return value;
  return rounded::float_of(rounded::bits_of(value) | (code & 0x80U) << 24);
}

}  // namespace zeropage::offload

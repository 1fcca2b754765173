// How squares are added without an error, on the host and in CUDA kernels alike. Free of torch and of
// CUDA.
//
// Two fp64 numbers take up to 1024 squares. The upper one begins at a power of two, the window's base,
// which is so large that all sums lie between it and its double. So each addition rounds to multiples
// of one unit, and what it rounds away is a number of fp64, which the lower one takes (as in Rump,
// Ogita and Oishi 2008, "Accurate floating-point summation part I", section 3). Both sums are exact if
// the squares are multiples of a number that is not too small beside the unit. So a window has a
// largest and a least exponent. What is smaller than that is added by itself (optim/exact_digits.h),
// and so is what no window holds.
#pragma once

#include <cstdint>
#include <variant>

#include "optim/low_precision.h"

namespace zeropage::optim {

// Elements that a warp takes at once.
inline constexpr int kBlockNumel = 256;

// The first of them, of a precision that has norms.
using FlatElements =
    std::variant<const double*, const float*, const BFloat16Bits*, const HalfBits*>;

template <typename Integer>
ZEROPAGE_ELEMENT Integer parts_of(Integer numel, Integer part_numel) {
  return (numel + part_numel - 1) / part_numel;
}

// What is squared of an element: its value in fp32, or, for fp64, the square, which is rounded.
ZEROPAGE_ELEMENT double widened(double element) {
  return optim::rounded::multiply(element, element);
}
template <typename Element>
ZEROPAGE_ELEMENT float widened(Element element) {
  return to_float(element);
}

// Exact: 24 bits of mantissa squared are 48.
ZEROPAGE_ELEMENT double square_of_widened(float value) {
  return optim::rounded::multiply(static_cast<double>(value), static_cast<double>(value));
}
ZEROPAGE_ELEMENT double square_of_widened(double square) {
  return square;
}

// Ordered as the magnitudes are, and 0 of 0 alone. Its upper bits are the exponent.
ZEROPAGE_ELEMENT uint32_t magnitude_key(float value) {
  return optim::rounded::bits_of(value) & 0x7fffffffU;
}
ZEROPAGE_ELEMENT uint32_t magnitude_key(double square) {
  const uint64_t bits = optim::rounded::bits_of(square) & INT64_MAX;
  return static_cast<uint32_t>(bits >> 32) | (static_cast<uint32_t>(bits) != 0 ? 1U : 0U);
}

inline constexpr int kWindowBits = 10;
inline constexpr int kWindowNumel = 1 << kWindowBits;

template <typename Element>
inline constexpr bool kIsFp64 = false;
template <>
inline constexpr bool kIsFp64<double> = true;

template <typename Element>
inline constexpr int kSignificantBits = 24;
template <>
inline constexpr int kSignificantBits<BFloat16Bits> = 8;
template <>
inline constexpr int kSignificantBits<HalfBits> = 11;

// Where the exponent begins in a key.
template <typename Element>
inline constexpr int kKeyShift = kIsFp64<Element> ? 20 : 23;

// From it on no window holds a number: infinities, NaNs, and squares whose window's base would be
// infinite.
template <typename Element>
inline constexpr uint32_t kEndOfWindows = kIsFp64<Element> ? (2046U - kWindowBits) << 20
                                                           : optim::detail::kInfinity;

// 2^exponent. exponent: of a normal number.
ZEROPAGE_ELEMENT double power_of_two(int exponent) {
  return optim::rounded::double_of(static_cast<uint64_t>(exponent + 1023) << 52);
}

// Takes up to kWindowNumel numbers of keys [least_key, end_key), and zeros.
struct SquareWindow {
  double base = 0;
  double unit = 0;  // that the upper sum is a multiple of
  uint32_t least_key = 0;
  uint32_t end_key = 0;
};

// The lower sum is less than 2^(b - 1) units, with b = kWindowBits. It is exact if it is less than
// 2^53 times what all of its terms are multiples of. Elements of p bits and an exponent e have
// squares below 2^(2 e + 2), multiples of 2^(2 e - 2 (p - 1)). With the base at b bits above the
// largest square, exponents may be 42 - (p - 1) apart for b = 10. Squares that were rounded to fp64
// are below 2^(e + 1), multiples of 2^(e - 52), and may be 53 - 2 b = 33 apart.
template <typename Element>
inline constexpr int kWindowSpan = kIsFp64<Element> ? 53 - 2 * kWindowBits
                                                    : (104 - 2 * kWindowBits -
                                                       2 * (kSignificantBits<Element> - 1)) /
                                                          2;

// The window of numbers up to an exponent as it stands in a key, kLeastExponent or more.
template <typename Element>
ZEROPAGE_ELEMENT SquareWindow window_below(uint32_t exponent) {
  const int of_number = static_cast<int>(exponent) - (kIsFp64<Element> ? 1023 : 127);
  const int above_squares = kIsFp64<Element> ? of_number + 1 : 2 * of_number + 2;
  SquareWindow window;
  window.base = power_of_two(above_squares + kWindowBits);
  window.unit = power_of_two(above_squares + kWindowBits - 52);
  const int least = static_cast<int>(exponent) - kWindowSpan<Element>;
  // Numbers without an exponent are multiples of what those of the least exponent are.
  window.least_key = least > 1 ? static_cast<uint32_t>(least) << kKeyShift<Element> : 1U;
  window.end_key = (exponent + 1) << kKeyShift<Element>;
  return window;
}

// The least for which there is a window: its unit is a normal number.
template <typename Element>
inline constexpr uint32_t kLeastExponent = kIsFp64<Element> ? 52 : 1;

template <typename Element>
ZEROPAGE_ELEMENT uint32_t exponent_of_key(uint32_t key) {
  const uint32_t exponent = key >> kKeyShift<Element>;
  return exponent < kLeastExponent<Element> ? kLeastExponent<Element> : exponent;
}

// high begins at the window's base, low at 0. Fused or not, the bits are the same.
template <bool kFused>
ZEROPAGE_ELEMENT void add_square(float value, double& high, double& low) {
  const auto wide = static_cast<double>(value);
  if constexpr (kFused) {
    const double sum = optim::rounded::multiply_add(wide, wide, high);
    const double taken = optim::rounded::add(sum, -high);
    low = optim::rounded::add(low, optim::rounded::multiply_add(wide, wide, -taken));
    high = sum;
  } else {
    const double square = optim::rounded::multiply(wide, wide);
    const double sum = optim::rounded::add(high, square);
    low = optim::rounded::add(low, optim::rounded::add(square, -optim::rounded::add(sum, -high)));
    high = sum;
  }
}
template <bool kFused>
ZEROPAGE_ELEMENT void add_square(double square, double& high, double& low) {
  const double sum = optim::rounded::add(high, square);
  low = optim::rounded::add(low, optim::rounded::add(square, -optim::rounded::add(sum, -high)));
  high = sum;
}

// What two sums are, as two terms that are not negative. high: less its base.
struct SquareTerms {
  double high = 0;
  double low = 0;
};
ZEROPAGE_ELEMENT SquareTerms terms_of(double high, double low, double unit) {
  if (low >= 0) return {high, low};
  // The sum is not negative, so high has the units that low lacks; unit is a power of two.
  const double lacking = optim::rounded::multiply(optim::rounded::round_up(-low / unit), unit);
  return {optim::rounded::add(high, -lacking), optim::rounded::add(low, lacking)};
}

}  // namespace zeropage::optim

// A state in 8 bits: the numbers of a block as codes, relative to the block's largest magnitude,
// which is its scale (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization",
// arXiv:2110.02861, section 2). Free of torch and of CUDA.
//
// A code is its level less one. There are 256 levels, or 128 where the code's bit 7 is a sign. The bits
// of a float, taken for an integer, are nearly its logarithm: exactly at powers of two, and straight
// between them. Shifted to the left by two, the bits of a level are so nearly those of its fourth
// power, and shifted back they are the level's again. A code's value is this power less that of level 1,
// so that code 0 is zero, in units in which the top level's is the scale.
//
// So each range of a factor of 16 below the scale has half as many levels as the one above it, and the
// four factors of two within a range have as many levels each, evenly spaced. This is the tree of the
// paper, whose ranges are decades that are evenly spaced altogether, but for two instructions where
// decades take a table. In the top range a number differs from its code's value by at most 1 / 64 of
// itself (1 / 32 with a sign), in the next one by twice that, and so on; by no more than 1 / 128 (1 / 64)
// of the block's largest anywhere. What is below 3 / 2^32 (3 / 2^28) of the largest becomes zero.
//
// The largest number of a block is the top code and stays exactly what it is: otherwise it would shrink
// with every step. What is quantised, dequantised and quantised again has the same codes.
//
// A block with an infinity or a NaN gets a NaN as its scale, and all of it is NaN from then on; other
// blocks are not touched. One whose largest is below 2^-125 becomes zero.
#pragma once

#include "optim/rounded.h"

namespace zeropage::optim {

enum class StateSign : uint8_t {
  kSigned,    // means
  kUnsigned,  // sums and means of squares
};

namespace detail {

constexpr float two_to(int n) {
  float power = 1;
  for (; n > 0; --n) power *= 2;
  for (; n < 0; ++n) power /= 2;
  return power;
}
constexpr uint32_t bits_of_two_to(int n) {
  return static_cast<uint32_t>(127 + n) << 23;
}

template <StateSign kSign>
inline constexpr int kLevelBits = kSign == StateSign::kSigned ? 7 : 8;

// Levels are counted in units of a power of two by which the top one is 2^33: shifted to the left its
// bits are those of 2, and no level's exponent runs over.
template <StateSign kSign>
inline constexpr int kUnit = 33 - kLevelBits<kSign>;
// A float whose last place is a unit, so that a code or-ed to its bits is as many units more.
template <StateSign kSign>
inline constexpr uint32_t kBitsOfCode0 = bits_of_two_to(23 + kUnit<kSign>);
// Makes level 1 of code 0.
template <StateSign kSign>
inline constexpr float kLevelOfCode0 = two_to(kUnit<kSign>) - two_to(23 + kUnit<kSign>);
// The power of level 1. All powers are twice what they stand for.
template <StateSign kSign>
inline constexpr float kLeastPower = two_to(1 - 4 * kLevelBits<kSign>);
// Bits of powers, shifted to the right, are levels in units of 2^kUnitBack. Rounds them to whole ones,
// and makes a code of what is then the last byte.
template <StateSign kSign>
inline constexpr int kUnitBack = -95 - kLevelBits<kSign>;
template <StateSign kSign>
inline constexpr float kToCode = two_to(23 + kUnitBack<kSign>) - two_to(kUnitBack<kSign>);

// Half of it has all its digits.
inline constexpr uint32_t kLeastScale = bits_of_two_to(-125);

}  // namespace detail

template <StateSign kSign>
inline constexpr uint32_t kTopCode = (1U << optim::detail::kLevelBits<kSign>)-1;

struct BlockScale {
  float scale;    // what codes are relative to
  float inverse;  // 2 / scale; 0: all codes are 0
};

// The scale for the largest bits_of() of a block's magnitudes; as integers they are ordered, with NaN on top.
ZEROPAGE_ELEMENT BlockScale block_scale(uint32_t largest_magnitude) {
  constexpr uint32_t kInfinity = 0x7f800000;
  constexpr uint32_t kNaN = 0x7fc00000;
  if (largest_magnitude < optim::detail::kLeastScale) return {0, 0};
  if (largest_magnitude >= kInfinity) return {optim::rounded::float_of(kNaN), 0};
  const float scale = optim::rounded::float_of(largest_magnitude);
  return {scale, optim::rounded::divide(2.0F, scale)};
}

ZEROPAGE_ELEMENT uint32_t magnitude_of(float value) {
  return optim::rounded::bits_of(value) & 0x7fffffffU;
}

// The code without its sign, of a finite value in a block whose inverse is not 0.
template <StateSign kSign>
ZEROPAGE_ELEMENT uint32_t quantised_magnitude(float value, float inverse) {
  const float magnitude =
      kSign == StateSign::kSigned ? optim::rounded::float_of(magnitude_of(value)) : value;
  const float power =
      optim::rounded::multiply_add(magnitude, inverse, optim::detail::kLeastPower<kSign>);
  const float level = optim::rounded::float_of(optim::rounded::bits_of(power) >> 2);
  return optim::rounded::bits_of(optim::rounded::add(level, optim::detail::kToCode<kSign>)) & 0xffU;
}

template <StateSign kSign>
ZEROPAGE_ELEMENT uint8_t quantised(float value, float inverse) {
  const uint32_t magnitude = quantised_magnitude<kSign>(value, inverse);
  if constexpr (kSign == StateSign::kUnsigned) return static_cast<uint8_t>(magnitude);
  return static_cast<uint8_t>(magnitude | (optim::rounded::bits_of(value) >> 24 & 0x80U));
}

// A code in 32 bits: its sign is bit 31 too. Bits 8 to 30 of a signed one do not count.
template <StateSign kSign>
ZEROPAGE_ELEMENT uint32_t widened(uint8_t code) {
  if constexpr (kSign == StateSign::kUnsigned) return code;
  return static_cast<uint32_t>(static_cast<int32_t>(static_cast<int8_t>(code)));
}

template <StateSign kSign>
ZEROPAGE_ELEMENT float value_of_widened(uint32_t code, float scale) {
  const uint32_t magnitude = kSign == StateSign::kSigned ? code & kTopCode<kSign> : code;
  const float level =
      optim::rounded::add(optim::rounded::float_of(magnitude | optim::detail::kBitsOfCode0<kSign>),
                          optim::detail::kLevelOfCode0<kSign>);
  const float power = optim::rounded::float_of(optim::rounded::bits_of(level) << 2);
  const float value = optim::rounded::multiply_add(
      power, optim::rounded::multiply(scale, 0.5F),
      optim::rounded::multiply(scale, -0.5F * optim::detail::kLeastPower<kSign>));
  if constexpr (kSign == StateSign::kUnsigned) return value;
  return optim::rounded::float_of(optim::rounded::bits_of(value) | (code & 0x80000000U));
}

template <StateSign kSign>
ZEROPAGE_ELEMENT float dequantised(uint8_t code, float scale) {
  return value_of_widened<kSign>(widened<kSign>(code), scale);
}

}  // namespace zeropage::optim

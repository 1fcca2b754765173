// bf16 and fp16 as their bits, converted by integer arithmetic that is the same on the host and in
// CUDA kernels. To fp32 is exact; from fp32 is to nearest even, also where the result is denormal,
// and beyond the largest number is infinity. A NaN becomes the one quiet NaN that c10 has.
#pragma once

#include "optim/rounded.h"

namespace zeropage::optim {

struct BFloat16Bits {
  uint16_t bits;
};
struct HalfBits {
  uint16_t bits;
};

namespace detail {

inline constexpr uint32_t kInfinity = 0x7f800000;
inline constexpr uint32_t kHalfInfinity = 0x7c00;
inline constexpr uint32_t kMantissaShift = 23;
// fp32 has 13 bits of mantissa more than fp16, and its exponent is 112 larger.
inline constexpr uint32_t kHalfShift = 13;
inline constexpr uint32_t kHalfBias = 112;

}  // namespace detail

ZEROPAGE_ELEMENT float to_float(float value) {
  return value;
}

ZEROPAGE_ELEMENT float to_float(BFloat16Bits value) {
  return optim::rounded::float_of(static_cast<uint32_t>(value.bits) << 16);
}

ZEROPAGE_ELEMENT float to_float(HalfBits value) {
  using namespace detail;
  const uint32_t shifted = (value.bits & 0x7fffU) << kHalfShift;
  // The product moves the exponent, and makes a normal number of what is denormal in fp16.
  const float finite =
      optim::rounded::multiply(optim::rounded::float_of(shifted),
                               optim::rounded::float_of((127U + kHalfBias) << kMantissaShift));
  const bool is_finite = (value.bits & kHalfInfinity) != kHalfInfinity;
  const uint32_t magnitude = is_finite ? optim::rounded::bits_of(finite) : shifted | kInfinity;
  return optim::rounded::float_of(magnitude | (value.bits & 0x8000U) << 16);
}

ZEROPAGE_ELEMENT void assign(BFloat16Bits& to, float value) {
  const uint32_t bits = optim::rounded::bits_of(value);
  const uint32_t nearest = (bits + 0x7fffU + (bits >> 16 & 1U)) >> 16;
  to.bits =
      static_cast<uint16_t>((bits & 0x7fffffffU) > optim::detail::kInfinity ? 0x7fc0U : nearest);
}

// random: less than 2^16. stochastic_rounding.h says what becomes of which number.
ZEROPAGE_ELEMENT void assign_stochastically(BFloat16Bits& to, float value, uint32_t random) {
  const uint32_t bits = optim::rounded::bits_of(value);
  const uint32_t cut = (bits + random) >> 16;
  to.bits = static_cast<uint16_t>((bits & 0x7fffffffU) > optim::detail::kInfinity ? 0x7fc0U : cut);
}

ZEROPAGE_ELEMENT void assign(HalfBits& to, float value) {
  using namespace detail;
  const uint32_t bits = optim::rounded::bits_of(value);
  const uint32_t magnitude = bits & 0x7fffffffU;
  const uint32_t normal =
      (magnitude + 0xfffU + (magnitude >> kHalfShift & 1U) - (kHalfBias << kMantissaShift)) >>
      kHalfShift;
  // The last bit of a number next to 0.5 is worth what the last bit of a denormal is in fp16.
  const uint32_t denormal =
      optim::rounded::bits_of(optim::rounded::add(optim::rounded::float_of(magnitude), 0.5F)) -
      optim::rounded::bits_of(0.5F);
  constexpr uint32_t kLeastNormal = (kHalfBias + 1) << kMantissaShift;
  constexpr uint32_t kOverflow = 0x47800000;  // 2^16
  uint32_t half = magnitude < kLeastNormal ? denormal : normal;
  half = magnitude >= kOverflow ? kHalfInfinity : half;
  half = magnitude > kInfinity ? 0x7e00U : half;
  to.bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000U));
}

// The number behind a copy in a lower precision: `wide`, if the copy is that, rounded; else what
// somebody wrote to the copy since.
template <typename Low>
ZEROPAGE_ELEMENT float adopted(float wide, Low copy) {
  Low rounded{};
  assign(rounded, wide);
  return rounded.bits == copy.bits ? wide : to_float(copy);
}

}  // namespace zeropage::optim

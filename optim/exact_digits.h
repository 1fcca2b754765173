// How the mantissa of a term lies in the digits of an exact sum (optim/exact_sum.h), on the host
// and in CUDA kernels alike. Free of torch and of CUDA.
#pragma once

#include <cstdint>

#include "optim/rounded.h"

namespace zeropage::optim {

// Number of digits of 32 bits, the first worth 2^-1074. After them come the numbers of infinities and of NaNs.
inline constexpr int kExactDigits = 67;
inline constexpr int kInfinitiesWord = kExactDigits;
inline constexpr int kNansWord = kExactDigits + 1;
inline constexpr int kExactWords = kExactDigits + 2;

inline constexpr int kDigitBits = 32;
inline constexpr uint64_t kDigitMask = 0xffffffff;
inline constexpr int kMantissaBits = 52;  // that are stored
inline constexpr uint64_t kImplicitBit = uint64_t{1} << kMantissaBits;
inline constexpr uint64_t kInfinityBits = uint64_t{0x7ff} << kMantissaBits;

// A term reaches into so many digits, and adds less than 2^32 to each: a word that begins at 0 holds
// this many terms below 2^62, without a carry.
inline constexpr int kDigitsOfTerm = 3;
inline constexpr int64_t kMostUncarriedTerms = int64_t{1} << 30;

struct PlacedMantissa {
  uint64_t mantissa = 0;
  int digit = 0;  // that its last bit lies in
  int shift = 0;  // by how many bits above that digit's own last one

  // What it adds to word digit + i. i: below kDigitsOfTerm.
  ZEROPAGE_ELEMENT uint64_t part(int i) const {
    const uint64_t shifted =
        i == 0 ? mantissa << shift : mantissa >> (kDigitBits * (i - 1)) >> (kDigitBits - shift);
    return shifted & kDigitMask;
  }
};

// bits: of a number that is finite and not negative, so below kInfinityBits.
ZEROPAGE_ELEMENT PlacedMantissa placed_mantissa(uint64_t bits) {
  const uint64_t exponent = bits >> kMantissaBits;
  const uint64_t is_normal = exponent != 0 ? 1 : 0;
  const auto place = static_cast<int>(exponent - is_normal);  // of the mantissa's last bit
  PlacedMantissa placed;
  placed.mantissa = (bits & (kImplicitBit - 1)) | is_normal << kMantissaBits;
  placed.digit = place / kDigitBits;
  placed.shift = place % kDigitBits;
  return placed;
}

// What terms add up to on the host, and how many infinities and NaNs there are. Words as ExactSum has
// them, uncarried.
struct ExactDigits {
  uint64_t words[kExactWords] = {};
  int64_t terms = 0;  // since the digits were last below 2^32

  // term: not negative, or a NaN.
  void add(double term) {
    const uint64_t bits = optim::rounded::bits_of(term) & INT64_MAX;
    if (bits >= kInfinityBits) {
      ++words[bits == kInfinityBits ? kInfinitiesWord : kNansWord];
      return;
    }
    if (++terms == kMostUncarriedTerms) carry();
    const PlacedMantissa placed = placed_mantissa(bits);
    for (int i = 0; i < kDigitsOfTerm; ++i) words[placed.digit + i] += placed.part(i);
  }

  void carry() {
    for (int digit = 0; digit + 1 < kExactDigits; ++digit) {
      words[digit + 1] += words[digit] >> kDigitBits;
      words[digit] &= kDigitMask;
    }
    terms = 0;
  }
};

}  // namespace zeropage::optim

#include "optim/exact_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "zeropage/check.h"

namespace zeropage::optim {
namespace {

constexpr size_t kInfinities = kInfinitiesWord;
constexpr size_t kNans = kNansWord;

// A term adds less than 2^52 + 2^32 to a digit, which holds less than 2^63.
constexpr int64_t kMostUncarried = 1024;

// Neither the words of 2^20 sums, added, nor the counts and the top digit of 2^52 terms reach it.
constexpr int64_t kWordLimit = int64_t{1} << 52;
constexpr int64_t kUncarriedLimit = kMostUncarriedTerms << 32;

// REQUIRES: the bits of a number that is finite and not negative.
void add_finite(ExactSum::Words& words, uint64_t bits) {
  const PlacedMantissa placed = placed_mantissa(bits);
  // In two parts that are shifted within 64 bits: the upper one is less than 2^52.
  const uint64_t low = (placed.mantissa & kDigitMask) << placed.shift;
  const uint64_t high = ((placed.mantissa >> kDigitBits) << placed.shift) + (low >> kDigitBits);
  const auto digit = static_cast<size_t>(placed.digit);
  words[digit] += static_cast<int64_t>(low & kDigitMask);
  words[digit + 1] += static_cast<int64_t>(high);
}

void add_other(ExactSum::Words& words, double term) {
  ZP_CHECK(std::isnan(term) || term >= 0, "ExactSum: expected terms of 0 or more, got ", term,
           "; add squares or magnitudes");
  if (std::isnan(term)) ++words[kNans];
  if (std::isinf(term)) ++words[kInfinities];
}

// Bits [place, place + 64) of the digits. REQUIRES: carried digits.
uint64_t bits_at(const ExactSum::Words& words, size_t place) {
  const auto digit_at = [&](size_t i) {
    return i < ExactSum::kDigits ? static_cast<uint64_t>(words[i]) : 0;
  };
  const size_t digit = place / kDigitBits;
  const size_t shift = place % kDigitBits;
  const uint64_t low = digit_at(digit) | digit_at(digit + 1) << kDigitBits;
  return shift == 0 ? low : low >> shift | digit_at(digit + 2) << (2 * kDigitBits - shift);
}

// Whether a bit below `place` is set.
bool any_below(const ExactSum::Words& words, size_t place) {
  const size_t digit = place / kDigitBits;
  const uint64_t rest =
      static_cast<uint64_t>(words[digit]) & ((uint64_t{1} << place % kDigitBits) - 1);
  return rest != 0 || std::any_of(words.begin(), words.begin() + static_cast<ptrdiff_t>(digit),
                                  [](int64_t word) { return word != 0; });
}

double rounded_to_nearest_even(const ExactSum::Words& words) {
  size_t top = ExactSum::kDigits;
  while (top > 0 && words[top - 1] == 0) --top;
  if (top == 0) return 0;
  const size_t width =
      (top - 1) * kDigitBits + std::bit_width(static_cast<uint64_t>(words[top - 1]));
  constexpr size_t kPrecision = kMantissaBits + 1;
  const size_t place = width > kPrecision ? width - kPrecision : 0;
  constexpr size_t kMostPlace = 2045;
  if (place > kMostPlace) return std::numeric_limits<double>::infinity();
  uint64_t mantissa = bits_at(words, place);
  if (place > 0) {
    const bool half = (bits_at(words, place - 1) & 1U) != 0;
    if (half && ((mantissa & 1U) != 0 || any_below(words, place - 1))) ++mantissa;
  }
  // The implicit bit counts the exponent up, and so does a mantissa that was rounded up to the next
  // power of two, up to infinity.
  return std::bit_cast<double>((static_cast<uint64_t>(place) << kMantissaBits) + mantissa);
}

}  // namespace

void ExactSum::carry() {
  for (size_t digit = 0; digit + 1 < kDigits; ++digit) {
    words_[digit + 1] += words_[digit] >> kDigitBits;
    words_[digit] &= static_cast<int64_t>(kDigitMask);
  }
  uncarried_ = 0;
}

void ExactSum::add(std::span<const double> terms) {
  ExactSum sum = *this;
  while (!terms.empty()) {
    if (sum.uncarried_ >= kMostUncarried) sum.carry();
    const size_t count =
        std::min(terms.size(), static_cast<size_t>(kMostUncarried - sum.uncarried_));
    for (const double term : terms.first(count)) {
      const auto bits = std::bit_cast<uint64_t>(term);
      if (bits < kInfinityBits) [[likely]] {
        add_finite(sum.words_, bits);
      } else {
        add_other(sum.words_, term);
      }
    }
    sum.uncarried_ += static_cast<int64_t>(count);
    terms = terms.subspan(count);
  }
  *this = sum;
}

void ExactSum::add(const ExactSum& other) {
  const Words theirs = other.words();
  if (uncarried_ >= kMostUncarried) carry();
  for (size_t i = 0; i < kWords; ++i) words_[i] += theirs[i];
  ++uncarried_;  // for a term of its own: the digits are smaller than one adds
}

void ExactSum::add(const ExactDigits& digits) {
  ExactDigits carried = digits;
  carried.carry();
  if (uncarried_ >= kMostUncarried) carry();
  for (size_t i = 0; i < kWords; ++i) words_[i] += static_cast<int64_t>(carried.words[i]);
  ++uncarried_;
}

double ExactSum::value() const {
  const Words carried = words();
  if (carried[kNans] != 0) return std::numeric_limits<double>::quiet_NaN();
  if (carried[kInfinities] != 0) return std::numeric_limits<double>::infinity();
  return rounded_to_nearest_even(carried);
}

ExactSum::Words ExactSum::words() const {
  ExactSum sum = *this;
  sum.carry();
  return sum.words_;
}

ExactSum ExactSum::carried(std::span<const int64_t, kWords> words, int64_t limit, const char* below,
                           const char* advice) {
  ExactSum sum;
  for (size_t i = 0; i < kWords; ++i) {
    ZP_CHECK(words[i] >= 0 && words[i] < limit, "ExactSum: word ", i, " of ", kWords,
             ": expected 0 or more and less than ", below, ", got ", words[i], "; ", advice);
    sum.words_[i] = words[i];
  }
  sum.carry();
  return sum;
}

ExactSum ExactSum::from_words(std::span<const int64_t, kWords> words) {
  return carried(words, kWordLimit, "2^52",
                 "pass what words() returned, or the sums of that over up to 2^20 ranks");
}

ExactSum ExactSum::from_uncarried(std::span<const int64_t, kWords> words) {
  return carried(words, kUncarriedLimit, "2^62",
                 "pass words that began at 0, and to which up to 2^30 terms were added");
}

}  // namespace zeropage::optim

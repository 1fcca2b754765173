// The sum of fp64 terms that are not negative, exact until it is read: it does not depend on the order of the
// terms, or on which rank, call or thread adds which of them. A fixed-point number wide enough for all of fp64
// (Kulisch 1971; with deferred carries as in
// Neal 2015, "Fast exact summation using small and large superaccumulators"), 552 bytes.
//
//   offload::ExactSum squares;
//   squares.add(of_one_gradient);               // fp64, say a weight
//   all_reduce(squares.words(), plus);          // on each rank; plain integers
//   const double norm = std::sqrt(offload::ExactSum::from_words(words).value());
//
// Takes about 2 ns a term. Room for 2^52 terms of any size. A value: copies are independent.
// Threads: as an int. Throws c10::Error on negative terms and on words of no sum; the sum
// is then as it was.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "optim/exact_digits.h"

namespace zeropage::optim {

class ExactSum {
 public:
  // Digits of 32 bits, the first worth 2^-1074; then how many infinities and how many NaNs.
  static constexpr size_t kDigits = kExactDigits;
  static constexpr size_t kWords = kExactWords;
  using Words = std::array<int64_t, kWords>;

  // Infinities and NaNs are counted.
  void add(double term) { add(std::span(&term, 1)); }
  void add(std::span<const double> terms);
  void add(const ExactSum& other);
  void add(const ExactDigits& digits);

  // Rounded once, to nearest even: above the largest fp64 is infinity. NaN if one was added, else
  // infinity if one was; 0 of no terms.
  double value() const;

  // For the wire: equal sums have equal words. Added as plain integers, the words of up to 2^20
  // sums are those from which from_words makes their sum.
  Words words() const;
  static ExactSum from_words(std::span<const int64_t, kWords> words);
  // The sum of words to which the parts of terms were added (optim/exact_digits.h) and nothing was carried.
  // Throws unless they are those of up to kMostUncarriedTerms terms.
  static ExactSum from_uncarried(std::span<const int64_t, kWords> words);

 private:
  static ExactSum carried(std::span<const int64_t, kWords> words, int64_t limit, const char* below,
                          const char* advice);
  void carry();

  Words words_{};          // a digit's carries wait in its upper half
  int64_t uncarried_ = 0;  // terms added since the digits were last below 2^32
};

}  // namespace zeropage::optim

#include "optim/exact_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"

namespace zeropage::optim::exact_sum_test {
namespace {

using ::testing::HasSubstr;

constexpr double kLargest = std::numeric_limits<double>::max();
constexpr double kLeast = std::numeric_limits<double>::denorm_min();
constexpr double kUlp = std::numeric_limits<double>::epsilon();

ExactSum sum_of(std::span<const double> terms) {
  ExactSum sum;
  sum.add(terms);
  return sum;
}

double value_of(const std::vector<double>& terms) {
  return sum_of(terms).value();
}

// Every exponent and mantissa with the same odds.
std::vector<double> any_terms(size_t count) {
  std::mt19937_64 random(1);
  std::uniform_int_distribution<uint64_t> bits(0, std::bit_cast<uint64_t>(kLargest));
  std::vector<double> terms(count);
  std::generate(terms.begin(), terms.end(), [&] { return std::bit_cast<double>(bits(random)); });
  return terms;
}

// Multiples of 2^-60 below 2^8: their sums fit 128 bits.
std::vector<double> narrow_terms(size_t count) {
  std::mt19937_64 random(2);
  std::uniform_int_distribution<int> exponents(-60, -46);
  std::vector<double> terms(count);
  std::generate(terms.begin(), terms.end(),
                [&] { return std::ldexp(static_cast<double>(random() >> 11), exponents(random)); });
  return terms;
}

// To nearest even, by the hardware.
double by_128_bits(const std::vector<double>& terms) {
  __extension__ using Wide = unsigned __int128;
  Wide sum = 0;
  for (const double term : terms) sum += static_cast<Wide>(std::ldexp(term, 60));
  return std::ldexp(static_cast<double>(sum), -60);
}

TEST(ExactSumTest, OfNothingIsZero) {
  EXPECT_EQ(ExactSum().value(), 0);
  EXPECT_EQ(value_of({0.0, -0.0}), 0);
}

TEST(ExactSumTest, OfOneTermIsThatTerm) {
  for (const double term : any_terms(100000)) ASSERT_EQ(value_of({term}), term);
  for (const double term : {kLeast, 2 * kLeast, kLargest, std::numeric_limits<double>::min(),
                            std::nextafter(std::numeric_limits<double>::min(), 0.0), 1.0}) {
    EXPECT_EQ(value_of({term}), term);
  }
}

TEST(ExactSumTest, OfTwoTermsIsRoundedAsTheHardwareRoundsIt) {
  const auto terms = any_terms(200000);
  for (size_t i = 0; i + 1 < terms.size(); ++i) {
    const double near = std::bit_cast<double>(std::bit_cast<uint64_t>(terms[i]) ^
                                              (std::bit_cast<uint64_t>(terms[i + 1]) >> 6));
    if (!std::isfinite(near)) continue;
    ASSERT_EQ(value_of({terms[i], near}), terms[i] + near);
    ASSERT_EQ(value_of({terms[i], terms[i + 1]}), terms[i] + terms[i + 1]);
  }
}

TEST(ExactSumTest, OfManyTermsIsRoundedOnce) {
  for (const size_t count : {3, 1000, 1023, 1024, 1025, 5000, 100000}) {
    const auto terms = narrow_terms(count);
    EXPECT_EQ(value_of(terms), by_128_bits(terms)) << count;
  }
}

TEST(ExactSumTest, RoundsATieToEvenAndWhatIsLeastAboveItUp) {
  EXPECT_EQ(value_of({1, kUlp / 2}), 1);
  EXPECT_EQ(value_of({1 + kUlp, kUlp / 2}), 1 + 2 * kUlp);
  EXPECT_EQ(value_of({1, kUlp / 2, kLeast}), 1 + kUlp);
  EXPECT_EQ(value_of({2 - kUlp, kUlp / 2}), 2);
  EXPECT_EQ(value_of({1, kUlp / 4, kUlp / 8, kUlp / 8}), 1);
}

TEST(ExactSumTest, KeepsWhatALargeTermWouldSwallow) {
  std::vector<double> terms(4096, kLeast);
  EXPECT_EQ(value_of(terms), 4096 * kLeast);
  terms.push_back(kLargest);
  EXPECT_EQ(value_of(terms), kLargest);
}

TEST(ExactSumTest, IsInfiniteAboveTheLargestNumberOnly) {
  const double half_ulp = std::ldexp(1.0, 970);
  EXPECT_EQ(value_of({kLargest, std::nextafter(half_ulp, 0.0)}), kLargest);
  EXPECT_EQ(value_of({kLargest, half_ulp}), INFINITY);
  EXPECT_EQ(value_of(std::vector<double>(100000, kLargest)), INFINITY);
}

TEST(ExactSumTest, RemembersInfinitiesAndNans) {
  EXPECT_EQ(value_of({1, INFINITY, 2}), INFINITY);
  EXPECT_TRUE(std::isnan(value_of({1, NAN, 2})));
  EXPECT_TRUE(std::isnan(value_of({-NAN})));
  EXPECT_TRUE(std::isnan(value_of({INFINITY, NAN})));
  ExactSum sum = sum_of(std::array{1.0});
  sum.add(sum_of(std::array<double, 1>{INFINITY}));
  EXPECT_EQ(sum.value(), INFINITY);
}

TEST(ExactSumTest, HasTheSameWordsInAnyOrderAndInAnyParts) {
  auto terms = any_terms(10000);
  const auto expected = sum_of(terms).words();
  std::mt19937_64 random(3);
  for (const size_t parts : {1, 2, 7, 1000}) {
    std::shuffle(terms.begin(), terms.end(), random);
    ExactSum sum;
    size_t begin = 0;
    for (size_t part = 1; part <= parts; ++part) {
      const size_t end = terms.size() * part / parts;
      sum.add(sum_of(std::span(terms).subspan(begin, end - begin)));
      begin = end;
    }
    EXPECT_EQ(sum.words(), expected) << parts;
    ExactSum one_by_one;
    for (const double term : terms) one_by_one.add(term);
    EXPECT_EQ(one_by_one.words(), expected);
  }
}

TEST(ExactSumTest, TravelsAsWordsThatAreAddedAsIntegers) {
  auto terms = any_terms(3000);
  terms[10] = INFINITY;
  terms[20] = INFINITY;
  ExactSum::Words added{};
  for (size_t rank = 0; rank < 3; ++rank) {
    const auto words = sum_of(std::span(terms).subspan(1000 * rank, 1000)).words();
    std::transform(added.begin(), added.end(), words.begin(), added.begin(), std::plus<>());
  }
  EXPECT_EQ(ExactSum::from_words(added).words(), sum_of(terms).words());
}

TEST(ExactSumTest, TakesTheWordsOfAMillionSums) {
  const double full = 2 - kUlp;
  auto words = sum_of(std::array{full, std::ldexp(full, -53), std::ldexp(full, -106)}).words();
  for (int64_t& word : words) word <<= 20;
  EXPECT_EQ(ExactSum::from_words(words).value(), std::ldexp(2.0, 20));
  EXPECT_EQ(ExactSum::from_words(words).words(),
            sum_of(std::array{std::ldexp(full, 20), std::ldexp(full, -33), std::ldexp(full, -86)})
                .words());
}

TEST(ExactSumTest, CarriesHoweverManyTermsThereWere) {
  // Every bit of the term is set. 2^33 of them by doubling, then ten million.
  const double term = 2 - kUlp;
  const std::vector<double> many(10000000, term);
  ExactSum sum = sum_of(std::array{term});
  for (int doubling = 0; doubling < 33; ++doubling) sum.add(sum);
  EXPECT_EQ(sum.value(), std::ldexp(term, 33));
  sum.add(many);
  std::vector<double> powers = {std::ldexp(term, 33)};
  for (int bit = 0; bit < 24; ++bit) {
    if ((many.size() >> bit & 1U) != 0) powers.push_back(std::ldexp(term, bit));
  }
  EXPECT_EQ(sum.words(), sum_of(powers).words());
}

TEST(ExactSumTest, RefusesNegativeTermsAndStaysAsItWas) {
  ExactSum sum = sum_of(std::array{1.0});
  const auto before = sum.words();
  EXPECT_EQ(testing::error_of([&] {
              sum.add(std::vector<double>{2, INFINITY, -0.5});
            }),
            "ExactSum: expected terms of 0 or more, got -0.5; add squares or magnitudes");
  EXPECT_EQ(sum.words(), before);
  EXPECT_THAT(testing::error_of([&] { sum.add(-INFINITY); }), HasSubstr("got -inf"));
}

TEST(ExactSumTest, RefusesWordsOfNoSum) {
  ExactSum::Words words{};
  words[3] = -1;
  EXPECT_THAT(testing::error_of([&] { ExactSum::from_words(words); }),
              HasSubstr("ExactSum: word 3 of 69: expected 0 or more and less than 2^52, got -1"));
  words[3] = int64_t{1} << 52;
  EXPECT_THAT(testing::error_of([&] { ExactSum::from_words(words); }), HasSubstr("word 3 of 69"));
}

}  // namespace
}  // namespace zeropage::optim::exact_sum_test

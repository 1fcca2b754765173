#include "optim/norm_table.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "tests/optim/step_cases.h"

namespace zeropage::optim::norm_table_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

// Cut at odd places; two parts share sum 1 and flag 40.
const std::vector<NormPart> kParts = {{.begin = 0, .numel = 3, .sum = 1, .flag = 0},
                                      {.begin = 3, .numel = 253, .sum = 0, .flag = 1},
                                      {.begin = 256, .numel = 5000, .sum = 0, .flag = 1},
                                      {.begin = 5300, .numel = 257, .sum = 1, .flag = 40},
                                      {.begin = 5557, .numel = 1, .sum = 1, .flag = 40}};
constexpr NormSizes kSizes = {.sums = 2, .flags = 41};

ExactSum expected_sum(const torch::Tensor& flat, int64_t sum) {
  ExactSum expected;
  for (const NormPart& part : kParts) {
    if (part.sum != sum) continue;
    const auto wide = flat.narrow(0, part.begin, part.numel).to(at::kDouble);
    const auto squares = wide * wide;
    expected.add({squares.const_data_ptr<double>(), static_cast<size_t>(squares.numel())});
  }
  return expected;
}

TEST(NormTableTest, HasTheExactSumsOfItsPartsSquares) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto flat = random_numbers(6000, 1).to(dtype);
    const NormTable table(kParts, kSizes, at::kCPU);
    const auto words = kSizes.make_words(at::kCPU);
    table.add_squares(flat, words);
    const auto* const first = words.const_data_ptr<int64_t>();
    for (int64_t sum = 0; sum < 2; ++sum) {
      EXPECT_EQ(kSizes.sum(first, sum).words(), expected_sum(flat, sum).words()) << dtype;
    }
    for (int64_t flag = 0; flag < kSizes.flags; ++flag) EXPECT_FALSE(kSizes.flag(first, flag));
  }
}

// A page's layout decides where parts begin, and the pages' sizes decide how parts are cut.
TEST(NormTableTest, HasTheSameSumWhereverPartsBeginAndAreCut) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto elements = random_numbers(70000, 2).to(dtype);
    ExactSum::Words expected{};
    for (const int64_t shift : {0, 1, 2, 255}) {
      for (const int64_t cut : {70000, 1, 257, 4097}) {
        const auto flat = torch::cat({torch::full({shift}, NAN, elements.options()), elements});
        const std::vector<NormPart> parts =
            cut == 70000 ? std::vector<NormPart>{{.begin = shift, .numel = 70000}}
                         : std::vector<NormPart>{{.begin = shift + cut, .numel = 70000 - cut},
                                                 {.begin = shift, .numel = cut}};
        const NormTable table(parts, {.sums = 1, .flags = 1}, at::kCPU);
        const auto words = table.sizes().make_words(at::kCPU);
        table.add_squares(flat, words);
        const auto sum = table.sizes().sum(words.const_data_ptr<int64_t>(), 0).words();
        if (shift == 0 && cut == 70000) expected = sum;
        EXPECT_EQ(sum, expected) << dtype << " shifted by " << shift << ", cut at " << cut;
      }
    }
  }
}

TEST(NormTableTest, SetsTheFlagsOfPartsThatAreNotFinite) {
  const NormTable table(kParts, kSizes, at::kCPU);
  for (const auto& [place, flag] : {std::pair<int64_t, int64_t>{2, 0}, {3, 1}, {5557, 40}}) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      const auto flat = random_numbers(6000, 1);
      flat[place] = bad;
      flat[5256] = NAN;  // between parts
      const auto words = kSizes.make_words(at::kCPU);
      table.add_squares(flat, words);
      const auto* const first = words.const_data_ptr<int64_t>();
      for (int64_t other = 0; other < kSizes.flags; ++other) {
        EXPECT_EQ(kSizes.flag(first, other), other == flag) << other;
      }
      const double bad_sum = kSizes.sum(first, flag == 1 ? 0 : 1).value();
      EXPECT_TRUE(std::isnan(bad) ? std::isnan(bad_sum) : bad_sum == INFINITY);
    }
  }
}

TEST(NormTableTest, AddsToWhatOtherTablesLeft) {
  const auto flat = random_numbers(6000, 1);
  const NormTable table(kParts, kSizes, at::kCPU);
  const auto words = kSizes.make_words(at::kCPU);
  table.add_squares(flat, words);
  table.add_squares(flat * 3, words);
  ExactSum expected = expected_sum(flat, 0);
  expected.add(expected_sum(flat * 3, 0));
  EXPECT_EQ(kSizes.sum(words.const_data_ptr<int64_t>(), 0).words(), expected.words());
}

TEST(NormTableTest, OfNoPartsAddsNothing) {
  const NormTable table({}, kSizes, at::kCPU);
  const auto words = kSizes.make_words(at::kCPU);
  table.add_squares(torch::zeros({0}), words);
  EXPECT_TRUE(words.eq(0).all().item<bool>());
}

TEST(NormTableTest, RefusesGradientsAndWordsOfOthersInWords) {
  const NormTable table(kParts, kSizes, at::kCPU);
  EXPECT_THAT(
      error_of([&] { table.add_squares(torch::zeros({5557}), kSizes.make_words(at::kCPU)); }),
      HasSubstr("gradient: expected 5558 elements or more on cpu, got sizes [5557]"));
  EXPECT_THAT(
      error_of([&] { table.add_squares(torch::zeros({6000}), torch::zeros({3}, at::kLong)); }),
      HasSubstr("words: expected 140 of Long on cpu, got Long of sizes [3]"));
  EXPECT_THAT(error_of([&] {
                table.add_squares(torch::zeros({6000}, at::kInt), kSizes.make_words(at::kCPU));
              }),
              HasSubstr("expected fp64, fp32, bf16 or fp16, got Int"));
}

// A kernel adds so: three parts of 32 bits a term, never carried.
TEST(ExactDigitsTest, AddUpToTheExactSum) {
  std::mt19937_64 random(1);
  std::vector<double> terms;
  while (terms.size() < 100000) {
    const auto term = std::bit_cast<double>(random() >> 1);
    if (std::isfinite(term)) terms.push_back(term);
  }
  terms.insert(terms.end(),
               {0.0, std::numeric_limits<double>::denorm_min(), std::numeric_limits<double>::min(),
                std::numeric_limits<double>::max()});
  ExactSum::Words words{};
  for (const double term : terms) {
    const PlacedMantissa placed = placed_mantissa(std::bit_cast<uint64_t>(term));
    for (int i = 0; i < kDigitsOfTerm; ++i) {
      words[static_cast<size_t>(placed.digit + i)] += static_cast<int64_t>(placed.part(i));
    }
  }
  ExactSum expected;
  expected.add(terms);
  EXPECT_EQ(ExactSum::from_uncarried(words).words(), expected.words());
}

// All bits set, as often as words have room for.
TEST(ExactDigitsTest, HaveRoomForTheirMostTerms) {
  const PlacedMantissa placed = placed_mantissa(std::bit_cast<uint64_t>(2 - 0x1p-52));
  ExactSum::Words words{};
  for (int i = 0; i < kDigitsOfTerm; ++i) {
    words[static_cast<size_t>(placed.digit + i)] =
        static_cast<int64_t>(placed.part(i)) * (kMostUncarriedTerms - 1);
  }
  ExactSum expected;
  for (int bit = 0; bit < 30; ++bit) expected.add(std::ldexp(2 - 0x1p-52, bit));
  EXPECT_EQ(ExactSum::from_uncarried(words).words(), expected.words());
  words[1] = int64_t{1} << 62;
  EXPECT_THAT(error_of([&] { ExactSum::from_uncarried(words); }),
              HasSubstr("word 1 of 69: expected 0 or more and less than 2^62"));
}

}  // namespace
}  // namespace zeropage::optim::norm_table_test

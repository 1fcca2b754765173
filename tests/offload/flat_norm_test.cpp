#include "offload/flat_norm.h"

#include <bit>
#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "tests/offload/step_cases.h"

namespace zeropage::offload {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

// Squares of elements low, low + stride, ... of a block, the tree written as a recursion.
double tree_of_squares(const std::vector<double>& block, size_t low, size_t stride) {
  if (stride == block.size()) return block[low] * block[low];
  return tree_of_squares(block, low, 2 * stride) + tree_of_squares(block, low + stride, 2 * stride);
}

// The tree over [low, high), parted where the comm/ tree over ranks is.
double tree_of_terms(const double* terms, size_t low, size_t high) {
  if (high - low == 1) return terms[low];
  const size_t middle = low + std::bit_floor(high - low - 1);
  return tree_of_terms(terms, low, middle) + tree_of_terms(terms, middle, high);
}

class FlatNormTest : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, FlatNormTest,
                         ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST_P(FlatNormTest, SumsTheSquaresOfEachBlockInItsTree) {
  for (const int64_t numel : {1, 7, 255, 256, 257, 5000}) {
    const auto flat = random_numbers(numel, 1).to(GetParam());
    const auto sums = block_sums_of_squares(flat);
    ASSERT_EQ(sums.numel(), (numel + 255) / 256);
    for (int64_t block = 0; block < sums.numel(); ++block) {
      std::vector<double> elements(256);
      for (int64_t i = 256 * block; i < std::min<int64_t>(numel, 256 * block + 256); ++i) {
        elements[static_cast<size_t>(i % 256)] = flat[i].item<double>();
      }
      EXPECT_EQ(sums[block].item<double>(), tree_of_squares(elements, 0, 1)) << block;
    }
  }
}

TEST_P(FlatNormTest, IsTheNorm) {
  const auto flat = random_numbers(100003, 1).to(GetParam());
  const double norm = std::sqrt(sum_in_order(block_sums_of_squares(flat)).item<double>());
  EXPECT_NEAR(norm, flat.to(at::kDouble).norm().item<double>(), 1e-12 * norm);
}

TEST_P(FlatNormTest, FindsAnInfinityOrNanWhereverItIs) {
  const auto flat = random_numbers(67, 1).to(GetParam());
  EXPECT_EQ(found_inf(flat).item<float>(), 0);
  for (int64_t i = 0; i < flat.numel(); ++i) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      auto spoiled = flat.clone();
      spoiled[i] = bad;
      EXPECT_EQ(found_inf(spoiled).item<float>(), 1) << bad << " at " << i;
      EXPECT_EQ(found_inf(spoiled.narrow(0, 0, i)).item<float>(), 0);
    }
  }
}

TEST_P(FlatNormTest, TakesLargestAndDenormalNumbersForFinite) {
  auto patterns = torch::arange(-32768, 32768, at::kInt);
  auto flat = GetParam() == at::kFloat ? (patterns * 65536).view(at::kFloat)
                                       : patterns.to(at::kShort).view(GetParam());
  flat = flat.masked_select(flat.isfinite());
  EXPECT_EQ(found_inf(flat).item<float>(), 0);
}

TEST(FlatNormTest, HasTheSameBitsForAnyNumberOfThreads) {
  const auto flat = random_numbers(3000001, 1);
  const int threads_before = at::get_num_threads();
  std::vector<double> sums;
  for (const int threads : {1, 2, 5}) {
    at::set_num_threads(threads);
    sums.push_back(sum_in_order(block_sums_of_squares(flat)).item<double>());
  }
  at::set_num_threads(threads_before);
  EXPECT_EQ(sums[0], sums[1]);
  EXPECT_EQ(sums[0], sums[2]);
}

TEST(FlatNormTest, DoesNotOverflow) {
  const auto flat = torch::full({1000}, std::numeric_limits<float>::max());
  const double sum = sum_in_order(block_sums_of_squares(flat)).item<double>();
  EXPECT_NEAR(std::sqrt(sum), std::sqrt(1000.0) * std::numeric_limits<float>::max(), 1e30);
}

TEST(SumInOrderTest, IsTheTreeOfNeighbours) {
  for (const int64_t numel : {1, 2, 3, 5, 1000, 2047, 2048, 2049, 4097, 100001}) {
    const auto terms = random_numbers(numel, 4).to(at::kDouble) / 3;
    EXPECT_EQ(sum_in_order(terms).item<double>(),
              tree_of_terms(terms.data_ptr<double>(), 0, static_cast<size_t>(numel)))
        << numel;
  }
}

TEST(SumInOrderTest, OfAlignedPartsIsASumOfTheTree) {
  const auto terms = random_numbers(10000, 4).to(at::kDouble) / 3;
  const auto parts =
      torch::cat({sum_in_order(terms.narrow(0, 0, 4096)), sum_in_order(terms.narrow(0, 4096, 4096)),
                  sum_in_order(terms.narrow(0, 8192, 10000 - 8192))});
  EXPECT_TRUE(same_bits_of(sum_in_order(terms), sum_in_order(parts)));
}

TEST(SumInOrderTest, OfNothingIsZero) {
  EXPECT_EQ(block_sums_of_squares(torch::zeros({0})).numel(), 0);
  EXPECT_EQ(sum_in_order(torch::zeros({0}, at::kDouble)).item<double>(), 0);
  EXPECT_EQ(found_inf(torch::zeros({0})).item<float>(), 0);
}

TEST(FlatNormTest, RefusesOtherTensorsInWords) {
  EXPECT_EQ(error_of([] { block_sums_of_squares(torch::zeros({3}, at::kDouble)); }),
            "block_sums_of_squares: flat: expected fp32, bf16 or fp16, got Double; convert it with "
            ".to()");
  EXPECT_THAT(error_of([] {
                found_inf(torch::zeros({3, 3}));
              }),
              HasSubstr("found_inf: flat: expected a flat, contiguous tensor, got sizes [3, 3]"));
  EXPECT_EQ(error_of([] { sum_in_order(torch::zeros({3})); }),
            "sum_in_order: terms: expected fp64, got Float; block_sums_of_squares() makes them");
}

}  // namespace
}  // namespace zeropage::offload

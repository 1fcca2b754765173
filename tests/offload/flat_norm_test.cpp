#include "offload/flat_norm.h"

#include <bit>
#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "offload/cpu/flat_norm.h"
#include "offload/exact_sum.h"
#include "tests/harness/errors.h"
#include "tests/offload/step_cases.h"

namespace zeropage::offload::flat_norm_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

// Squares of elements low, low + stride, ... of a block, the tree written as a recursion.
double tree_of_squares(const std::vector<double>& block, size_t low, size_t stride) {
  if (stride == block.size()) return block[low] * block[low];
  return tree_of_squares(block, low, 2 * stride) + tree_of_squares(block, low + stride, 2 * stride);
}

double sum_of_squares(const torch::Tensor& flat) {
  const auto sums = block_sums_of_squares(flat);
  ExactSum squares;
  squares.add({sums.const_data_ptr<double>(), static_cast<size_t>(sums.numel())});
  return squares.value();
}

class FlatNormTest : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, FlatNormTest,
                         ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf),
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

TEST(FlatNormTest, HasTheSameBitsOnAnyProcessor) {
  const auto flat = random_numbers(5003, 1).to(at::kFloat);
  const auto bf16 = flat.to(at::kBFloat16);
  const auto half = flat.to(at::kHalf);
  const auto wide = flat.to(at::kDouble) / 3;
  const std::vector<std::pair<torch::Tensor, FlatElements>> all = {
      {flat, flat.const_data_ptr<float>()},
      {bf16, static_cast<const BFloat16Bits*>(bf16.const_data_ptr())},
      {half, static_cast<const HalfBits*>(half.const_data_ptr())},
      {wide, wide.const_data_ptr<double>()}};
  for (const auto& [tensor, elements] : all) {
    const auto expected = torch::empty({20}, at::kDouble);
    cpu::block_sums_of_squares(elements, 5003, expected.mutable_data_ptr<double>(), 0, 20,
                               cpu::Instructions::kAnyProcessor);
    EXPECT_TRUE(same_bits_of(expected, block_sums_of_squares(tensor))) << tensor.scalar_type();
    const auto by_avx2 = torch::empty_like(expected);
    cpu::block_sums_of_squares(elements, 5003, by_avx2.mutable_data_ptr<double>(), 0, 20,
                               cpu::Instructions::kAvx2);
    EXPECT_TRUE(same_bits_of(expected, by_avx2)) << tensor.scalar_type();
  }
}

TEST_P(FlatNormTest, IsTheNorm) {
  const auto flat = random_numbers(100003, 1).to(GetParam());
  const double norm = std::sqrt(sum_of_squares(flat));
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
  const auto patterns = torch::arange(-32768, 32768, at::kLong);
  const auto elements = torch::empty({0}, at::TensorOptions(GetParam())).element_size();
  const auto words = elements == 8 ? at::kLong : elements == 4 ? at::kInt : at::kShort;
  auto flat = (patterns * (int64_t{1} << (8 * elements - 16))).to(words).view(GetParam());
  flat = flat.masked_select(flat.isfinite());
  EXPECT_EQ(found_inf(flat).item<float>(), 0);
}

TEST(FlatNormTest, HasTheSameBitsForAnyNumberOfThreads) {
  const auto flat = random_numbers(3000001, 1);
  const int threads_before = at::get_num_threads();
  std::vector<double> sums;
  for (const int threads : {1, 2, 5}) {
    at::set_num_threads(threads);
    sums.push_back(sum_of_squares(flat));
  }
  at::set_num_threads(threads_before);
  EXPECT_EQ(sums[0], sums[1]);
  EXPECT_EQ(sums[0], sums[2]);
}

TEST(FlatNormTest, DoesNotDependOnHowBlocksAreShared) {
  const auto flat = random_numbers(100003, 1);
  ExactSum parts;
  for (const auto& [begin, end] : {std::pair{51200, 100003}, {0, 256}, {256, 51200}}) {
    const auto sums = block_sums_of_squares(flat.slice(0, begin, end));
    parts.add({sums.const_data_ptr<double>(), static_cast<size_t>(sums.numel())});
  }
  EXPECT_EQ(parts.value(), sum_of_squares(flat));
}

TEST(FlatNormTest, DoesNotOverflow) {
  const auto flat = torch::full({1000}, std::numeric_limits<float>::max());
  const double sum = sum_of_squares(flat);
  EXPECT_NEAR(std::sqrt(sum), std::sqrt(1000.0) * std::numeric_limits<float>::max(), 1e30);
}

TEST(FlatNormTest, OfFp64RoundsEachSquareOnceAndMayOverflow) {
  EXPECT_EQ(sum_of_squares(torch::full({1}, 1 / 3.0, at::kDouble)), (1 / 3.0) * (1 / 3.0));
  EXPECT_EQ(sum_of_squares(torch::full({1}, 1.3e154, at::kDouble)), 1.3e154 * 1.3e154);
  EXPECT_EQ(sum_of_squares(torch::full({1}, 1.4e154, at::kDouble)), INFINITY);
}

TEST(FlatNormTest, IsNotFiniteIfAnElementIsNot) {
  auto flat = random_numbers(1000, 1);
  flat[300] = -INFINITY;
  EXPECT_EQ(sum_of_squares(flat), INFINITY);
  flat[700] = NAN;
  EXPECT_TRUE(std::isnan(sum_of_squares(flat)));
}

TEST(FlatNormTest, OfNothingIsZero) {
  EXPECT_EQ(block_sums_of_squares(torch::zeros({0})).numel(), 0);
  EXPECT_EQ(sum_of_squares(torch::zeros({0})), 0);
  EXPECT_EQ(found_inf(torch::zeros({0})).item<float>(), 0);
}

TEST(FlatNormTest, IsOnlyCheckedOnTheMetaDevice) {
  EXPECT_EQ(block_sums_of_squares(torch::zeros({257}, at::kMeta)).sizes(), at::IntArrayRef{2});
  EXPECT_TRUE(found_inf(torch::zeros({257}, at::kMeta)).is_meta());
}

TEST(FlatNormTest, RefusesOtherTensorsInWords) {
  EXPECT_EQ(error_of([] { block_sums_of_squares(torch::zeros({3}, at::kInt)); }),
            "block_sums_of_squares: flat: expected fp64, fp32, bf16 or fp16, got Int; convert it "
            "with .to()");
  EXPECT_THAT(error_of([] {
                found_inf(torch::zeros({3, 3}));
              }),
              HasSubstr("found_inf: flat: expected a flat, contiguous tensor, got sizes [3, 3]"));
}

}  // namespace
}  // namespace zeropage::offload::flat_norm_test

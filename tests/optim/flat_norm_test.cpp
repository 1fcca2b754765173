#include "optim/flat_norm.h"

#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "optim/cpu/flat_norm.h"
#include "optim/exact_sum.h"
#include "optim/flat_tensor.h"
#include "tests/harness/errors.h"
#include "tests/optim/step_cases.h"

namespace zeropage::optim::flat_norm_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

double sum_of(const torch::Tensor& flat) {
  return sum_of_squares(flat).value();
}

class FlatNormTest : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, FlatNormTest,
                         ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST_P(FlatNormTest, IsTheSumOfTheSquaresRoundedOnce) {
  for (const int64_t numel : {1, 7, 8, 15, 16, 17, 255, 1023, 1024, 1025, 5000}) {
    const auto flat = random_numbers(numel, 1).to(GetParam());
    ExactSum expected;
    for (int64_t i = 0; i < numel; ++i) {
      const auto element = flat[i].item<double>();
      expected.add(element * element);
    }
    EXPECT_EQ(sum_of_squares(flat).words(), expected.words()) << numel;
  }
}

TEST_P(FlatNormTest, IsTheNorm) {
  const auto flat = random_numbers(100003, 1).to(GetParam());
  const double norm = std::sqrt(sum_of(flat));
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
    sums.push_back(sum_of(flat));
  }
  at::set_num_threads(threads_before);
  EXPECT_EQ(sums[0], sums[1]);
  EXPECT_EQ(sums[0], sums[2]);
}

TEST_P(FlatNormTest, DependsNeitherOnTheOrderNorOnWhereElementsAreCut) {
  const auto flat = random_numbers(100003, 1).to(GetParam());
  const auto expected = sum_of_squares(flat).words();
  EXPECT_EQ(sum_of_squares(flat.flip(0)).words(), expected);
  EXPECT_EQ(sum_of_squares(flat.roll(1, 0)).words(), expected);
  ExactSum parts;
  for (const auto& [begin, end] : {std::pair{51201, 100003}, {0, 255}, {255, 51201}}) {
    parts.add(sum_of_squares(flat.slice(0, begin, end)));
  }
  EXPECT_EQ(parts.words(), expected);
}

// Runs of 1024, as loops take them, each of which asks for another way to be added than the one before it.
torch::Tensor runs_unlike_each_other() {
  constexpr int64_t kRun = 1024;
  const auto run = [](int exponent, uint64_t seed) {
    return torch::ldexp(random_numbers(kRun, seed), torch::tensor(exponent));
  };
  const auto with = [&](int exponent, float element) {
    auto odd = run(exponent, 5);
    odd[777] = element;
    return odd;
  };
  std::vector<torch::Tensor> runs;
  uint64_t seed = 10;
  // Alike, somewhat larger, far larger, smaller, far smaller; and again, as the next runs begin from there.
  for (const int exponent : {0, 0, 1, 3, 5, 9, 12, 2, -8, -14, -14, -9}) {
    runs.push_back(run(exponent, ++seed));
  }
  for (int exponent = -26; exponent <= -2; ++exponent) {
    runs.push_back(run(0, ++seed));
    runs.push_back(with(0, std::ldexp(1.0F + std::ldexp(1.0F, -7), exponent)));
  }
  runs.insert(runs.end(), {torch::zeros({kRun}), run(0, 3), torch::zeros({kRun}), run(0, 4),
                           torch::full({kRun}, 3.0F), torch::full({kRun}, 3.5F), run(0, 2),
                           torch::full({kRun}, 30000.0F), run(-10, 6), run(0, 9).slice(0, 0, 100)});
  return torch::cat(runs);
}

ExactSum sum_with(optim::cpu::Instructions instructions, const torch::Tensor& flat) {
  ExactDigits digits;
  optim::cpu::add_squares(flat_elements({"test", "flat"}, flat), 0, flat.numel(), digits,
                          instructions);
  ExactSum sum;
  sum.add(digits);
  return sum;
}

TEST_P(FlatNormTest, AddsEachSquareHoweverMagnitudesChangeWithEverySetOfInstructions) {
  const auto flat = runs_unlike_each_other().to(GetParam());
  const auto wide = flat.to(at::kDouble);
  ExactSum expected;
  for (int64_t i = 0; i < flat.numel(); ++i) {
    const double element = wide.const_data_ptr<double>()[i];
    expected.add(element * element);
  }
  for (const auto instructions :
       {optim::cpu::Instructions::kAnyProcessor, optim::cpu::Instructions::kAvx2,
        optim::cpu::Instructions::kAvx512}) {
    EXPECT_EQ(sum_with(instructions, flat).words(), expected.words());
    for (const float bad : {INFINITY, NAN}) {
      auto spoiled = flat.clone();
      spoiled[1500] = bad;
      const double sum = sum_with(instructions, spoiled).value();
      EXPECT_TRUE(std::isnan(bad) ? std::isnan(sum) : sum == bad);
    }
  }
}

TEST(FlatNormTest, DoesNotOverflow) {
  const auto flat = torch::full({1000}, std::numeric_limits<float>::max());
  const double sum = sum_of(flat);
  EXPECT_NEAR(std::sqrt(sum), std::sqrt(1000.0) * std::numeric_limits<float>::max(), 1e30);
}

TEST(FlatNormTest, OfFp64RoundsEachSquareOnceAndMayOverflow) {
  EXPECT_EQ(sum_of(torch::full({1}, 1 / 3.0, at::kDouble)), (1 / 3.0) * (1 / 3.0));
  EXPECT_EQ(sum_of(torch::full({1}, 1.3e154, at::kDouble)), 1.3e154 * 1.3e154);
  EXPECT_EQ(sum_of(torch::full({1}, 1.4e154, at::kDouble)), INFINITY);
}

TEST(FlatNormTest, IsNotFiniteIfAnElementIsNot) {
  auto flat = random_numbers(1000, 1);
  flat[300] = -INFINITY;
  EXPECT_EQ(sum_of(flat), INFINITY);
  flat[700] = NAN;
  EXPECT_TRUE(std::isnan(sum_of(flat)));
}

TEST(FlatNormTest, OfNothingIsZero) {
  EXPECT_EQ(sum_of(torch::zeros({0})), 0);
  EXPECT_EQ(sum_of(torch::zeros({5000})), 0);
  EXPECT_EQ(found_inf(torch::zeros({0})).item<float>(), 0);
}

TEST(FlatNormTest, IsOnlyCheckedOnTheMetaDevice) {
  EXPECT_TRUE(found_inf(torch::zeros({257}, at::kMeta)).is_meta());
}

TEST(FlatNormTest, RefusesOtherTensorsInWords) {
  EXPECT_EQ(error_of([] { sum_of_squares(torch::zeros({3}, at::kInt)); }),
            "sum_of_squares: flat: expected fp64, fp32, bf16 or fp16, got Int; convert it "
            "with .to()");
  EXPECT_THAT(error_of([] { sum_of_squares(torch::zeros({3}, at::kMeta)); }),
              HasSubstr("expected a tensor on the host, got one on meta; NormTable"));
  EXPECT_THAT(error_of([] {
                found_inf(torch::zeros({3, 3}));
              }),
              HasSubstr("found_inf: flat: expected a flat, contiguous tensor, got sizes [3, 3]"));
}

}  // namespace
}  // namespace zeropage::optim::flat_norm_test

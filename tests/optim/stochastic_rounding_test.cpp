#include "optim/stochastic_rounding.h"

#include <bit>
#include <cmath>
#include <limits>

#include <ATen/core/PhiloxRNGEngine.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "optim/cpu/stochastic_rounding.h"
#include "tests/harness/errors.h"
#include "tests/optim/step_cases.h"

namespace zeropage::optim::stochastic_rounding_test {
namespace {

using namespace zeropage::testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

torch::Tensor rounded_at(const torch::Tensor& from, const RoundingPlace& place = {}) {
  const auto to = torch::full({from.numel()}, 7, at::kBFloat16);
  round_stochastically(from, to, place);
  return to;
}

torch::Tensor of_bits(const std::vector<uint32_t>& bits) {
  std::vector<float> numbers;
  for (const uint32_t number : bits) numbers.push_back(std::bit_cast<float>(number));
  return torch::tensor(numbers);
}

uint16_t bits_of_first(const torch::Tensor& bf16) {
  return static_cast<uint16_t>(bf16.view(at::kShort)[0].item<int16_t>());
}

TEST(PhiloxTest, HasTheBitsOfItsKnownAnswers) {
  const auto ones = 0xffffffffU;
  EXPECT_THAT(philox({{0, 0, 0, 0}}, {{0, 0}}).words,
              ElementsAre(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  EXPECT_THAT(philox({{ones, ones, ones, ones}}, {{ones, ones}}).words,
              ElementsAre(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  EXPECT_THAT(
      philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, {{0xa4093822, 0x299f31d0}}).words,
      ElementsAre(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

TEST(PhiloxTest, HasTheBitsOfLibtorchsEngine) {
  for (const uint64_t seed : {0x0ULL, 0x123456789abcdef0ULL, ~0ULL}) {
    for (const uint64_t subsequence : {0x0ULL, 0xfedcba9876543210ULL}) {
      for (const uint64_t offset : {0x0ULL, 0x5ULL, 0x1234567800ULL}) {
        at::Philox4_32 engine(seed, subsequence, offset);
        const auto low = [](uint64_t word) { return static_cast<uint32_t>(word); };
        const auto high = [](uint64_t word) { return static_cast<uint32_t>(word >> 32); };
        const auto block =
            philox({{low(offset), high(offset), low(subsequence), high(subsequence)}},
                   {{low(seed), high(seed)}});
        for (const uint32_t word : block.words) EXPECT_EQ(word, engine());
      }
    }
  }
}

TEST(RoundingPlaceTest, PacksBlockStepAndTensorWithoutAmbiguity) {
  const RoundingPlace place{.step = 0xabcd12345678, .tensor = 0x9abcdef0};
  EXPECT_THAT(counter_of(place, 0x123400000005).words,
              ElementsAre(0x00000005, 0xabcd1234, 0x12345678, 0x9abcdef0));
}

TEST(StochasticRoundingTest, AddsTheLanesOfItsBlocksAndTruncates) {
  const RoundingPlace place{
      .seed = 0x123456789, .step = 77, .tensor = 5, .first_element = 8 * 0x100000000 - 40};
  const auto from = random_numbers(3000, 1);
  const auto to = rounded_at(from, place).view(at::kShort);
  for (int64_t i = 0; i < from.numel(); ++i) {
    const int64_t element = place.first_element + i;
    const auto block = random_block(place, static_cast<uint64_t>(element / 8));
    const uint32_t word = block.words[element % 8 / 2];
    const uint32_t random = element % 2 == 0 ? word & 0xffffU : word >> 16;
    const auto expected = (std::bit_cast<uint32_t>(from[i].item<float>()) + random) >> 16;
    ASSERT_EQ(static_cast<uint16_t>(to[i].item<int16_t>()), expected) << i;
  }
}

TEST(StochasticRoundingTest, HasTheSameBitsOnAnyProcessor) {
  const auto from = random_numbers(5000, 1);
  const auto expected = torch::empty({5000}, at::kBFloat16);
  for (const int64_t first :
       {int64_t{0}, int64_t{3}, 8 * int64_t{0xfffffff0} + 5, int64_t{1} << 50}) {
    const RoundingPlace place{.seed = ~0ULL, .step = 1, .tensor = 2, .first_element = first};
    optim::cpu::round_stochastically(from.const_data_ptr<float>(),
                                     static_cast<BFloat16Bits*>(expected.mutable_data_ptr()), 5000,
                                     place, optim::cpu::Instructions::kAnyProcessor);
    EXPECT_TRUE(same_bits_of(expected, rounded_at(from, place))) << first;
    const auto by_avx2 = torch::empty_like(expected);
    optim::cpu::round_stochastically(from.const_data_ptr<float>(),
                                     static_cast<BFloat16Bits*>(by_avx2.mutable_data_ptr()), 5000,
                                     place, optim::cpu::Instructions::kAvx2);
    EXPECT_TRUE(same_bits_of(expected, by_avx2)) << first;
  }
}

TEST(StochasticRoundingTest, IsUnbiased) {
  // The mean of 2^20 draws of variance p (1 - p) ulp^2: within five of its standard deviations.
  constexpr int64_t kDraws = 1 << 20;
  for (const float number : {1.0001F, -1.0001F, 1.0039F, 3.14159F, -1e-3F, 1.7e-39F, 3e38F}) {
    const auto from = torch::full({kDraws}, number);
    const double below = std::bit_cast<float>(std::bit_cast<uint32_t>(number) & 0xffff0000U);
    const double above =
        std::bit_cast<float>((std::bit_cast<uint32_t>(number) & 0xffff0000U) + 0x10000U);
    const double up = (number - below) / (above - below);
    const double deviation =
        std::abs(above - below) * std::sqrt(up * (1 - up) / static_cast<double>(kDraws));
    const double mean = rounded_at(from, {.seed = 1}).to(at::kDouble).mean().item<double>();
    EXPECT_NEAR(mean, number, 5 * deviation) << number;
  }
}

TEST(StochasticRoundingTest, RoundsUpAsOftenAsTheNumberIsFarFromItsLowerNeighbour) {
  constexpr int64_t kDraws = 1 << 20;
  for (const uint32_t low : {0x0001U, 0x1000U, 0x4000U, 0x8000U, 0xc000U, 0xfff0U}) {
    for (const uint32_t high : {0x3f80U, 0xbf80U, 0x0001U, 0x7f7fU}) {
      const auto from = of_bits({high << 16 | low}).expand({kDraws}).contiguous();
      const auto ups = (rounded_at(from, {.seed = 2, .step = high}).view(at::kShort) !=
                        static_cast<int16_t>(high))
                           .sum()
                           .item<int64_t>();
      const double up = low / 65536.0;
      const double deviation = std::sqrt(up * (1 - up) * static_cast<double>(kDraws));
      EXPECT_NEAR(static_cast<double>(ups), up * kDraws, 5 * deviation + 1) << low << " " << high;
    }
  }
}

TEST(StochasticRoundingTest, GoesToANeighbourOnly) {
  const auto from = random_numbers(100000, 1);
  const auto below = from.view(at::kInt).bitwise_and(-65536);
  const auto bits = rounded_at(from).to(at::kFloat).view(at::kInt);
  EXPECT_TRUE(torch::logical_or(bits == below, bits == below + 65536).all().item<bool>());
}

TEST(StochasticRoundingTest, LeavesEveryBf16NumberAndInfinityAsItIs) {
  const auto all = torch::arange(-32768, 32768, at::kInt).to(at::kShort).view(at::kBFloat16);
  const auto numbers = all.masked_select(all.isnan().logical_not());
  for (const uint64_t seed : {1, 2, 3}) {
    EXPECT_TRUE(same_bits_of(numbers, rounded_at(numbers.to(at::kFloat), {.seed = seed})));
  }
}

TEST(StochasticRoundingTest, MakesTheQuietNanOfEveryNan) {
  for (const uint32_t nan : {0x7f800001U, 0x7fc00000U, 0x7fffffffU, 0xff800001U, 0xffffffffU}) {
    EXPECT_EQ(bits_of_first(rounded_at(of_bits({nan}))), 0x7fc0) << nan;
  }
}

TEST(StochasticRoundingTest, TakesInfinityForTheNeighbourOfTheLargest) {
  const auto largest = torch::full({1 << 16}, std::numeric_limits<float>::max());
  for (const double sign : {1.0, -1.0}) {
    const auto infinite = rounded_at(largest * sign) == sign * INFINITY;
    const auto count = infinite.sum().item<int64_t>();
    EXPECT_GT(count, (1 << 16) - 20);  // all but one in 65536
    EXPECT_TRUE(
        torch::logical_or(infinite, rounded_at(largest * sign).isfinite()).all().item<bool>());
  }
}

TEST(StochasticRoundingTest, HasTheSameBitsHoweverItIsSplit) {
  const auto from = random_numbers(10007, 1);
  const RoundingPlace place{.seed = 3, .step = 4, .tensor = 5, .first_element = 11};
  const auto expected = rounded_at(from, place);
  for (const int64_t part : {1, 3, 8, 127, 128, 129, 4096}) {
    const auto to = torch::empty_like(expected);
    for (int64_t begin = 0; begin < from.numel(); begin += part) {
      const int64_t numel = std::min(part, from.numel() - begin);
      RoundingPlace own = place;
      own.first_element += begin;
      round_stochastically(from.narrow(0, begin, numel), to.narrow(0, begin, numel), own);
    }
    EXPECT_TRUE(same_bits_of(expected, to)) << part;
  }
}

TEST(StochasticRoundingTest, HasTheSameBitsForAnyNumberOfThreads) {
  const auto from = random_numbers(1000003, 1);
  const int threads_before = at::get_num_threads();
  std::vector<torch::Tensor> all;
  for (const int threads : {1, 2, 5}) {
    at::set_num_threads(threads);
    all.push_back(rounded_at(from, {.first_element = 5}));
  }
  at::set_num_threads(threads_before);
  EXPECT_TRUE(same_bits_of(all[0], all[1]));
  EXPECT_TRUE(same_bits_of(all[0], all[2]));
}

TEST(StochasticRoundingTest, HasOtherBitsInAnotherStepTensorSeedOrPlace) {
  const auto from = torch::full({4096}, 1.004F);  // about halfway
  const RoundingPlace place{.seed = 1, .step = 2, .tensor = 3, .first_element = 0};
  const auto share_that_differs = [&](const RoundingPlace& other) {
    return (rounded_at(from, place) != rounded_at(from, other)).to(at::kFloat).mean().item<float>();
  };
  auto other = place;
  EXPECT_EQ(share_that_differs(other), 0);
  other.seed = 1 | uint64_t{1} << 32;
  EXPECT_NEAR(share_that_differs(other), 0.5, 0.05);
  other = place;
  for (const uint64_t step :
       {uint64_t{3}, uint64_t{2} | uint64_t{1} << 32, kMostRoundingSteps - 1}) {
    other.step = step;
    EXPECT_NEAR(share_that_differs(other), 0.5, 0.05) << step;
  }
  other = place;
  other.tensor = kMostRoundingTensors - 1;
  EXPECT_NEAR(share_that_differs(other), 0.5, 0.05);
  other = place;
  for (const int64_t first : {int64_t{1}, int64_t{8}, int64_t{8} << 32, int64_t{1} << 50}) {
    other.first_element = first;
    EXPECT_NEAR(share_that_differs(other), 0.5, 0.05) << first;
  }
}

TEST(StochasticRoundingTest, KeepsUpdatesThatRoundingToNearestLoses) {
  // 1000 times 1e-4 on bf16 weights of 1, whose neighbour is 2^-7 away.
  auto weights = torch::ones({4096}, at::kBFloat16);
  for (uint64_t step = 0; step < 1000; ++step) {
    weights = rounded_at(weights.to(at::kFloat) + 1e-4F, {.step = step});
  }
  EXPECT_NEAR(weights.to(at::kDouble).mean().item<double>(), 1.1, 3e-3);
}

TEST(StochasticRoundingTest, IsOnlyCheckedOnTheMetaDevice) {
  round_stochastically(torch::empty({9}, at::kMeta),
                       torch::empty({9}, at::TensorOptions(at::kMeta).dtype(at::kBFloat16)), {});
  const auto none = torch::empty({0});
  round_stochastically(none, none.to(at::kBFloat16), {});
}

TEST(StochasticRoundingTest, RefusesOtherTensorsAndPlacesInWords) {
  const auto from = torch::zeros({4});
  const auto to = from.to(at::kBFloat16);
  const auto refusal = [](const torch::Tensor& one, const torch::Tensor& other,
                          const RoundingPlace& place = {}) {
    return error_of([&] { round_stochastically(one, other, place); });
  };
  EXPECT_EQ(refusal(to, to),
            "round_stochastically: from: expected fp32, got BFloat16; convert it with .to()");
  EXPECT_THAT(refusal(from, from), HasSubstr("to: expected bf16, got Float; other precisions"));
  EXPECT_THAT(refusal(from, to.narrow(0, 0, 3)), HasSubstr("to: expected 4 elements"));
  EXPECT_THAT(refusal(from, to.to(at::kMeta)), HasSubstr("to: expected it on cpu"));
  EXPECT_THAT(refusal(from, to.view({2, 2})), HasSubstr("to: expected a flat, contiguous tensor"));
  EXPECT_THAT(refusal(from, to, {.first_element = -1}), HasSubstr("first_element: expected 0"));
  EXPECT_THAT(refusal(from, to, {.first_element = kMostRoundingNumel - 3}),
              HasSubstr("4 elements from it within 2^51, got 2251799813685245"));
  EXPECT_EQ(refusal(from, to, {.first_element = kMostRoundingNumel - 4}), "");
  EXPECT_THAT(refusal(from, to, {.step = kMostRoundingSteps}),
              HasSubstr("step: expected less than 2^48, got 281474976710656"));
  EXPECT_THAT(refusal(from, to, {.tensor = kMostRoundingTensors}),
              HasSubstr("tensor: expected less than 2^32, got 4294967296"));
}

}  // namespace
}  // namespace zeropage::optim::stochastic_rounding_test

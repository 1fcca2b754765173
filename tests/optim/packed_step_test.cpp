// Fused steps with states that are smaller than fp32, and with split values.
#include "optim/cpu/packed_step.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "optim/flat_tensor.h"
#include "optim/packed_tensors.h"
#include "optim/split_values.h"
#include "tests/harness/errors.h"
#include "tests/optim/packed_cases.h"

namespace zeropage::optim::packed_step_test {
namespace {

using namespace zeropage::testing;
using namespace packed_cases;
using optim::cpu::Instructions;
using ::testing::HasSubstr;
using torch::optim::AdagradOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

constexpr int64_t kNumel = kPackedNumel;

Stretch part_of(const Stretch& stretch, int64_t begin, int64_t numel) {
  Stretch part = narrow(stretch, begin, numel);
  const int64_t block = (stretch.place.first_in_block + begin) / kStateBlockNumel;
  part.place = stretch.place;
  part.place.first_element += begin;
  part.place.first_in_block = (stretch.place.first_in_block + begin) % kStateBlockNumel;
  for (const auto& scales : stretch.scales) {
    part.scales.push_back(scales.narrow(0, block, blocks_of(part.place.first_in_block, numel)));
  }
  if (stretch.remainders.defined()) {
    part.remainders = stretch.remainders.narrow(0, begin, numel);
  }
  return part;
}

// So many blocks that loops which have three of them in hand have whole ones on both sides.
constexpr int64_t kNumelOfManyBlocks = 2900;

// Two steps more, by all sets of instructions.
void expect_same_bits_of_every_set(const AnyOptions& options, const Stretch& before) {
  const auto stepped_with = [&](Instructions instructions) {
    Stretch copy = copy_of_packed(before);
    for (const int64_t step : {3, 4}) {
      const UpdateRule rule =
          std::visit([&](const auto& known) { return rule_of(known, step); }, options);
      FlatStretch flat{.gradient = copy.gradient.const_data_ptr(), .numel = copy.values.numel()};
      if (!copy.remainders.defined()) flat.values = copy.values.mutable_data_ptr<float>();
      optim::cpu::packed_step(rule, packed_of(copy, flat, step), 0, flat.numel, instructions);
    }
    return copy;
  };
  const Stretch expected = stepped_with(Instructions::kAnyProcessor);
  EXPECT_TRUE(same_packed_bits(expected, stepped_with(Instructions::kAvx2)));
  EXPECT_TRUE(same_packed_bits(expected, stepped_with(Instructions::kAvx512)));
}

TEST(PackedStepTest, HasTheSameBitsForEverySetOfInstructions) {
  for_each_case([](const AnyOptions& options, const Format& format) {
    Stretch before = packed_stretch(options, format, kNumelOfManyBlocks);
    run_steps(options, 2, before);
    expect_same_bits_of_every_set(options, before);
  });
}

TEST(PackedStepTest, HasTheSameBitsForEverySetWhereBlocksAmongOthersHaveNoScale) {
  for_each_case([](const AnyOptions& options, const Format& format) {
    if (format.states != StateFormat::k8Bit) return;
    Stretch before = packed_stretch(options, format, kNumelOfManyBlocks);
    // Blocks begin at 179, 435, 691 and so on. The fifth one's states stay zero, and the eighth one's become NaN.
    before.gradient.narrow(0, 179 + 3 * 256, 256).zero_();
    before.gradient[179 + 6 * 256 + 5] = std::numeric_limits<float>::infinity();
    expect_same_bits_of_every_set(options, before);
  });
}

TEST(PackedStepTest, HasTheSameBitsForAnySplitAtBlocksAndAnyNumberOfThreads) {
  for_each_case([](const AnyOptions& options, const Format& format) {
    at::set_num_threads(1);
    Stretch whole = packed_stretch(options, format);
    Stretch split = packed_stretch(options, format);
    run_steps(options, 2, whole);
    for (int64_t number = 1; number <= 2; ++number) {
      const auto gradient = random_numbers(kNumel, static_cast<uint64_t>(10 + number));
      split.gradient = gradient;
      int64_t begin = 0;
      // Ends where a block does, and at the end.
      for (const int64_t end : {int64_t{179}, int64_t{691}, int64_t{947}, kNumel}) {
        step(options, number, part_of(split, begin, end - begin), {.scale = 0.7});
        begin = end;
      }
    }
    EXPECT_TRUE(same_packed_bits(whole, split));
  });
  constexpr int64_t kManyThreads = 200000;
  for (const Format& format : all_formats()) {
    const auto with_threads = [&](int threads) {
      at::set_num_threads(threads);
      Stretch stretch = packed_stretch(AdamWOptions(0.01), format, kManyThreads);
      run_steps(AdamWOptions(0.01), 2, stretch);
      return stretch;
    };
    EXPECT_TRUE(same_packed_bits(with_threads(1), with_threads(3))) << format;
  }
  at::set_num_threads(1);
}

TEST(PackedStepTest, StaysCloseToStatesInFp32) {
  for (const StepCase& step_case : all_step_cases()) {
    for (const StateFormat format : {StateFormat::kBf16, StateFormat::k8Bit}) {
      SCOPED_TRACE(::testing::Message() << step_case.name << ", " << static_cast<int>(format));
      Stretch exact = packed_stretch(step_case.options, {StateFormat::kFp32, Values::kFp32});
      exact.place = {};
      Stretch packed = packed_stretch(step_case.options, {format, Values::kFp32});
      const torch::Tensor before = exact.values.clone();
      run_steps(step_case.options, 20, exact);
      run_steps(step_case.options, 20, packed);
      const auto moved = (exact.values - before).norm().item<double>();
      const auto apart = (exact.values - packed.values).norm().item<double>();
      // Lion takes signs, so a small difference of a mean near zero turns a whole step.
      const bool is_lion = std::holds_alternative<LionOptions>(step_case.options);
      EXPECT_LE(apart, (is_lion ? 0.25 : 0.05) * moved);
    }
  }
}

TEST(PackedStepTest, StepsSplitValuesToTheBitsOfFp32Ones) {
  for (const StepCase& step_case : all_step_cases()) {
    SCOPED_TRACE(step_case.name);
    Stretch fp32 = packed_stretch(step_case.options, {StateFormat::kFp32, Values::kFp32});
    Stretch split = packed_stretch(step_case.options, {StateFormat::kFp32, Values::kSplit});
    run_steps(step_case.options, 4, fp32);
    run_steps(step_case.options, 4, split);
    EXPECT_TRUE(same_bits_of(fp32.values, joined_values(split.values, split.remainders)));
    for (size_t i = 0; i < fp32.states.size(); ++i) {
      EXPECT_TRUE(same_bits_of(fp32.states[i], split.states[i])) << "state " << i;
    }
  }
}

TEST(PackedStepTest, TakesGradientsAndCopiesOutInLowerPrecisions) {
  const AdamWOptions options(0.01);
  for (const StateFormat format : {StateFormat::kBf16, StateFormat::k8Bit}) {
    Stretch wide = packed_stretch(options, {format, Values::kFp32});
    Stretch low = packed_stretch(options, {format, Values::kFp32});
    low.gradient = low.gradient.to(at::kBFloat16);
    wide.gradient = low.gradient.to(at::kFloat);
    low.copy_out = torch::zeros({kNumel}, at::kBFloat16);
    step(options, 1, wide);
    step(options, 1, low);
    EXPECT_TRUE(same_packed_bits(wide, low));
    EXPECT_TRUE(same_bits_of(wide.values.to(at::kBFloat16), low.copy_out));
  }
}

TEST(PackedStepTest, RoundsBf16StatesToTheirMeanOverParameters) {
  // A constant gradient gives one state to all elements; bf16 has no number near 0.1 0.3.
  const AdamWOptions options(0.01);
  Stretch stretch = packed_stretch(options, {StateFormat::kBf16, Values::kFp32}, 100000);
  stretch.gradient = torch::full({100000}, 0.3);
  step(options, 1, stretch);
  const auto means = stretch.states[0].to(at::kFloat);
  const double spacing = std::pow(2.0, -13);
  EXPECT_NEAR(means.mean().item<double>(), 0.03, spacing / 50);
  EXPECT_GT((means.max() - means.min()).item<double>(), 0);
  const auto step_of_another = [&](auto change) {
    Stretch other = packed_stretch(options, {StateFormat::kBf16, Values::kFp32}, 100000);
    other.gradient = stretch.gradient;
    change(other.place);
    step(options, 1, other);
    return other.states[0];
  };
  EXPECT_TRUE(same_bits_of(stretch.states[0], step_of_another([](auto&) {})));
  const auto other_seed = step_of_another([](StretchPlace& place) { place.seed = 6; });
  const auto other_parameter = step_of_another([](StretchPlace& place) { place.parameter = 4; });
  EXPECT_FALSE(same_bits_of(stretch.states[0], other_seed));
  EXPECT_FALSE(same_bits_of(stretch.states[0], other_parameter));
}

TEST(PackedStepTest, KeepsAnInfinityOfAGradientWithinItsBlock) {
  const AdamWOptions options(0.01);
  Stretch stretch = packed_stretch(options, {StateFormat::k8Bit, Values::kFp32});
  stretch.gradient[300] = std::numeric_limits<float>::infinity();
  step(options, 1, stretch);
  stretch.gradient[300] = 0;
  step(options, 2, stretch);
  // The block of element 300 has elements 179 to 434.
  const auto is_nan = stretch.values.isnan();
  EXPECT_TRUE(is_nan.narrow(0, 179, 256).all().item<bool>());
  EXPECT_EQ(is_nan.sum().item<int64_t>(), 256);
}

TEST(PackedStepTest, ZeroesTheGradientAndChangesNothingElseWhereFoundInfIsSet) {
  for (const Format& format : all_formats()) {
    Stretch stretch = packed_stretch(AdamWOptions(0.01), format);
    const Stretch before = copy_of_packed(stretch);
    const GradientFactors factors{.found_inf = torch::ones({1}), .after = GradientAfter::kZeroed};
    step(AdamWOptions(0.01), 1, stretch, factors);
    EXPECT_TRUE(same_packed_bits(before, stretch)) << format;
    EXPECT_FALSE(stretch.gradient.any().item<bool>());
    stretch.gradient.fill_(1);
    step(AdamWOptions(0.01), 1, stretch, {.after = GradientAfter::kZeroed});
    EXPECT_FALSE(same_packed_bits(before, stretch)) << format;
    EXPECT_FALSE(stretch.gradient.any().item<bool>());
  }
}

TEST(PackedStepTest, TakesTheBytesThatAreWritten) {
  for (const StateFormat format : {StateFormat::kFp32, StateFormat::kBf16, StateFormat::k8Bit}) {
    const Stretch stretch = packed_stretch(AdagradOptions(0.1), {format, Values::kFp32});
    size_t bytes = stretch.states[0].nbytes();
    for (const auto& scales : stretch.scales) bytes += scales.nbytes();
    EXPECT_EQ(static_cast<int64_t>(bytes), state_bytes(format, kFirstInBlock, kNumel));
  }
}

TEST(PackedStepTest, BeginsStatesAtTheirInitialValueInEveryFormat) {
  for (const StateFormat format : {StateFormat::kBf16, StateFormat::k8Bit}) {
    const auto options = AdagradOptions(1).initial_accumulator_value(0.25).eps(0);
    Stretch stretch = packed_stretch(options, {format, Values::kFp32});
    stretch.values.zero_();
    stretch.gradient.fill_(1e-4);
    step(options, 1, stretch);
    // lr gradient / sqrt(0.25 + gradient^2)
    EXPECT_TRUE(torch::allclose(stretch.values, torch::full({kNumel}, -2e-4), 1e-4, 0));
  }
}

TEST(PackedStepTest, RefusesWhatDoesNotBelongTogether) {
  const SGDOptions options = SGDOptions(0.1).momentum(0.9);
  const auto refusal = [&](auto change) {
    Stretch stretch = packed_stretch(options, {StateFormat::k8Bit, Values::kSplit});
    change(stretch);
    return error_of([&] { step(options, 1, stretch); });
  };
  EXPECT_THAT(refusal([](Stretch& it) { it.scales.clear(); }), HasSubstr("expected 1 with states"));
  EXPECT_THAT(refusal([](Stretch& it) { it.place.first_in_block = 0; }),
              HasSubstr("one a block of 2003 elements"));
  EXPECT_THAT(refusal([](Stretch& it) { it.place.first_in_block = 256; }),
              HasSubstr("expected 0 to 255"));
  EXPECT_THAT(refusal([](Stretch& it) { it.remainders = it.remainders.to(at::kInt); }),
              HasSubstr("expected int16"));
  EXPECT_THAT(refusal([](Stretch& it) { it.values = it.values.to(at::kFloat); }),
              HasSubstr("expected bf16 beside remainders"));
  EXPECT_THAT(refusal([](Stretch& it) { it.states[0] = it.states[0].to(at::kInt); }),
              HasSubstr("expected fp32, bf16 or uint8"));
  EXPECT_THAT(refusal([](Stretch& it) { it.copy_out = it.values.clone(); }),
              HasSubstr("expected none beside remainders"));
}

TEST(SplitValuesTest, JoinToTheBitsThatWereSplit) {
  auto bits =
      torch::randint(std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max(),
                     {100000}, at::detail::createCPUGenerator(1), at::kInt);
  bits = torch::cat({bits, torch::tensor({0, 0x8000, 0x7fff, 0x18000, 0x7f7fffff, 0x7f800000,
                                          static_cast<int>(0xff7fffff)},
                                         at::kInt)});
  const torch::Tensor values = bits.view(at::kFloat);
  const auto is_number = values.isnan().logical_not();
  const SplitValues split = split_values(values);
  const auto joined = joined_values(split.high, split.low);
  EXPECT_TRUE(
      torch::equal(joined.view(at::kInt).masked_select(is_number), bits.masked_select(is_number)));
  EXPECT_TRUE(torch::equal(split.high.isnan(), values.isnan()));
  // To nearest: another bf16 than LibTorch's at ties alone.
  const auto nearest = values.to(at::kBFloat16);
  const auto differs = (split.high != nearest).logical_and(is_number);
  EXPECT_TRUE((bits.masked_select(differs).bitwise_and(0xffff) == 0x8000).all().item<bool>());
}

TEST(SplitValuesTest, AreThoseOfTheLoops) {
  const auto values = torch::cat({random_numbers(1000, 1), torch::tensor({NAN, INFINITY, -0.0F})});
  const SplitValues expected = split_values(values);
  for (int64_t i = 0; i < values.numel(); ++i) {
    const SplitValue split = zeropage::optim::split(values[i].item<float>());
    EXPECT_EQ(split.high.bits,
              static_cast<uint16_t>(expected.high.view(at::kShort)[i].item<int16_t>()));
    EXPECT_EQ(split.low, static_cast<uint16_t>(expected.low[i].item<int16_t>()));
  }
}

}  // namespace
}  // namespace zeropage::optim::packed_step_test

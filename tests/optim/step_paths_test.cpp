// Which way a step takes: the instructions, the zeroing of the gradient, a list of stretches.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "optim/cpu/fused_step.h"
#include "optim/flat_tensor.h"
#include "optim/fused_step.h"
#include "tests/harness/errors.h"
#include "tests/optim/step_cases.h"

namespace zeropage::optim::step_paths_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

class StepPathsTest : public EveryStepCaseTest {};

// The same with raw pointers to it.
FlatStretch flat_of(const Stretch& stretch) {
  FlatStretch flat;
  flat.values = stretch.values.data_ptr<float>();
  flat.gradient = stretch.gradient.data_ptr();
  flat.gradient_precision = precision_of({"test", "gradient"}, stretch.gradient);
  if (stretch.copy_out.defined()) {
    flat.copy_out = stretch.copy_out.data_ptr();
    flat.copy_precision = precision_of({"test", "copy_out"}, stretch.copy_out);
  }
  for (size_t i = 0; i < stretch.states.size(); ++i) {
    flat.states[i] = stretch.states[i].data_ptr<float>();
  }
  flat.numel = stretch.values.numel();
  return flat;
}

// The second step by those instructions.
void step_with(optim::cpu::Instructions instructions, const AnyOptions& options,
               const Stretch& stretch) {
  const auto rule = std::visit([](const auto& known) { return rule_of(known, 2); }, options);
  optim::cpu::fused_step(rule, flat_of(stretch), 0, stretch.values.numel(), instructions);
}

TEST_F(StepPathsTest, HaveTheSameBitsWithAnyInstructionsAtAnyNumelAndOffset) {
  for_each_case([&] {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const auto copy : {at::ScalarType::Undefined, at::kBFloat16, at::kHalf}) {
        const auto before = random_stretch(options(), 4200, dtype, copy);
        for (const auto& [begin, numel] : std::vector<std::pair<int64_t, int64_t>>{
                 {0, 333}, {1, 15}, {5, 67}, {3, 1}, {7, 4099}, {32, 2048}}) {
          SCOPED_TRACE(c10::str(dtype, " ", copy, " from ", begin, ": ", numel));
          const auto expected = copy_of(before);
          step_with(optim::cpu::Instructions::kAnyProcessor, options(),
                    narrow(expected, begin, numel));
          for (const auto instructions :
               {optim::cpu::Instructions::kAvx2, optim::cpu::Instructions::kAvx512}) {
            const auto actual = copy_of(before);
            step_with(instructions, options(), narrow(actual, begin, numel));
            EXPECT_TRUE(same_bits_of(expected, actual));
          }
        }
      }
    }
  });
}

TEST_F(StepPathsTest, ZeroTheGradientIfAsked) {
  for_each_case([&] {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const auto kept = random_stretch(options(), 2077, dtype, at::kBFloat16);
      const auto zeroed = copy_of(kept);
      const auto skipped = copy_of(kept);
      step(options(), 2, kept, {.scale = 0.7});
      const GradientFactors zeroing{.scale = 0.7, .after = GradientAfter::kZeroed};
      // A slice of it first: what lies beside the slice stays.
      step(options(), 2, narrow(zeroed, 3, 1500), zeroing);
      EXPECT_TRUE(same_bits_of(kept.gradient.narrow(0, 0, 3), zeroed.gradient.narrow(0, 0, 3)));
      EXPECT_EQ(zeroed.gradient.narrow(0, 3, 1500).count_nonzero().item<int64_t>(), 0);
      EXPECT_TRUE(
          same_bits_of(kept.gradient.narrow(0, 1503, 574), zeroed.gradient.narrow(0, 1503, 574)));
      step(options(), 2, narrow(zeroed, 0, 3), zeroing);
      step(options(), 2, narrow(zeroed, 1503, 574), zeroing);
      EXPECT_TRUE(same_bits_of(torch::zeros_like(kept.gradient), zeroed.gradient));
      EXPECT_TRUE(same_bits_of(kept, zeroed));

      const auto before = copy_of(skipped);
      step(options(), 2, skipped, {.found_inf = torch::ones({1}), .after = GradientAfter::kZeroed});
      EXPECT_TRUE(same_bits_of(before, skipped));
      EXPECT_TRUE(same_bits_of(torch::zeros_like(kept.gradient), skipped.gradient));
    }
  });
}

TEST_F(StepPathsTest, HaveTheSameBitsForAListOfStretchesAndAnyNumberOfThreads) {
  for_each_case([&] {
    const int threads_before = at::get_num_threads();
    // More than one thread's share in all, cut inside of a stretch; some are empty, some have copies.
    std::vector<Stretch> before;
    for (const int64_t numel : {0, 1, 1000, 40000, 0, 17, 70001, 3, 0}) {
      const auto copy = numel % 2 == 0 ? at::ScalarType::Undefined : at::kHalf;
      before.push_back(
          random_stretch(options(), numel, numel > 1000 ? at::kFloat : at::kBFloat16, copy));
    }
    std::vector<Stretch> singly;
    for (const Stretch& stretch : before) {
      singly.push_back(copy_of(stretch));
      step(options(), 2, singly.back(), {.scale = 0.7});
    }
    for (const int threads : {2, 3}) {
      at::set_num_threads(threads);
      std::vector<Stretch> list;
      for (const Stretch& stretch : before) list.push_back(copy_of(stretch));
      std::visit(
          [&](const auto& known) {
            fused_step(known, 2, std::span<const Stretch>(list), {.scale = 0.7});
          },
          options());
      for (size_t i = 0; i < list.size(); ++i) {
        EXPECT_TRUE(same_bits_of(singly[i], list[i])) << "stretch " << i << ", threads " << threads;
      }
    }
    at::set_num_threads(threads_before);
  });
}

TEST(GradientTest, IsSeenByAutogradToHaveChangedIfZeroed) {
  const Stretch stretch{.values = torch::ones({3}), .gradient = torch::ones({3})};
  const auto version = stretch.gradient._version();
  fused_step(SGDOptions(1.0), 1, stretch);
  EXPECT_EQ(stretch.gradient._version(), version);
  fused_step(SGDOptions(1.0), 1, stretch, {.after = GradientAfter::kZeroed});
  EXPECT_GT(stretch.gradient._version(), version);
}

TEST(ListOfStretchesTest, IsCheckedBeforeAnythingIsWritten) {
  const auto good = random_stretch(AdamWOptions(), 4);
  auto bad = copy_of(good);
  bad.states.pop_back();
  const auto before = copy_of(good);
  const auto refusal_of_list = [](const std::vector<Stretch>& list) {
    return error_of([&] { fused_step(AdamWOptions(), 1, std::span<const Stretch>(list)); });
  };
  EXPECT_THAT(refusal_of_list({good, bad}),
              HasSubstr("states: expected 2 with these options, got 1"));
  const auto elsewhere =
      map(good, [](const torch::Tensor& tensor) { return tensor.to(at::kMeta); });
  EXPECT_EQ(refusal_of_list({good, elsewhere}),
            "fused_step: stretches: expected all on cpu, where the first is, got one on meta; make "
            "a call for each device");
  EXPECT_TRUE(same_bits_of(before, good));
  EXPECT_EQ(refusal_of_list({}), "");
}

}  // namespace
}  // namespace zeropage::optim::step_paths_test

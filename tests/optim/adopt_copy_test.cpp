// Values that follow what was written to their copy, and hashes that tell where something was.
#include "optim/adopt_copy.h"

#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "optim/block_hashes.h"
#include "optim/fused_step.h"
#include "tests/harness/errors.h"

namespace zeropage::optim::adopt_copy_test {
namespace {

using ::testing::HasSubstr;
using zeropage::testing::error_of;

constexpr int64_t kNumel = 4096;

// Values of every exponent, and the odd ones.
torch::Tensor any_values() {
  auto generator = at::detail::createCPUGenerator(3);
  const torch::Tensor bits =
      torch::randint(std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max(),
                     {kNumel}, generator, torch::kInt);
  torch::Tensor values = bits.view(torch::kFloat).clone();
  values = torch::where(values.isnan(), torch::ones_like(values), values);
  values[0] = std::numeric_limits<float>::infinity();
  values[1] = -0.0F;
  values[2] = 1e-42F;
  return values;
}

class AdoptCopyTest : public ::testing::TestWithParam<torch::ScalarType> {};

TEST_P(AdoptCopyTest, LeavesValuesAloneWhoseCopyIsWhatLibtorchRoundedThemTo) {
  const torch::Tensor values = any_values();
  const torch::Tensor before = values.clone();
  adopt_copy(values, values.to(GetParam()));
  EXPECT_TRUE(torch::equal(values.view(torch::kInt), before.view(torch::kInt)));
}

TEST_P(AdoptCopyTest, TakesWhatWasWrittenAndNothingElse) {
  const torch::Tensor values = torch::randn({kNumel});
  const torch::Tensor before = values.clone();
  const torch::Tensor copy = values.to(GetParam());
  const torch::Tensor written = torch::arange(kNumel).remainder(7).eq(3);
  // No value of a normal distribution rounds to it: one that does is not noticed, and stays.
  copy.masked_fill_(written, 100);
  adopt_copy(values, copy);
  EXPECT_TRUE(torch::equal(values, torch::where(written, 100.0F, before)));
}

TEST_P(AdoptCopyTest, AFusedStepThatAdoptsIsAStepAfterIt) {
  for (const StateFormat format : {StateFormat::kFp32, StateFormat::kBf16, StateFormat::k8Bit}) {
    const torch::optim::AdamWOptions options(0.01);
    const torch::Tensor values = torch::randn({kNumel});
    const torch::Tensor gradient = torch::randn({kNumel});
    const torch::Tensor copy = values.to(GetParam());
    copy.narrow(0, 100, 1000).clamp_(-0.25, 0.25);
    const auto step = [&](bool adopts) {
      Stretch stretch{.values = values.clone(),
                      .gradient = gradient,
                      .copy_out = copy.clone(),
                      .states = make_states(options, values, format)};
      if (format == StateFormat::k8Bit) stretch.scales = make_scales(options, values, 0);
      if (adopts) {
        stretch.adopts_copy = true;
      } else {
        adopt_copy(stretch.values, stretch.copy_out);
      }
      fused_step(options, 1, stretch);
      return stretch;
    };
    const Stretch in_the_pass = step(true), before_it = step(false);
    EXPECT_TRUE(torch::equal(in_the_pass.values, before_it.values));
    EXPECT_TRUE(torch::equal(in_the_pass.copy_out, before_it.copy_out));
  }
}

INSTANTIATE_TEST_SUITE_P(Precisions, AdoptCopyTest,
                         ::testing::Values(torch::kBFloat16, torch::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(AdoptCopyOfFp32Test, TakesAll) {
  const torch::Tensor values = torch::zeros({8}), copy = torch::ones({8});
  adopt_copy(values, copy);
  EXPECT_TRUE(torch::equal(values, copy));
}

TEST(AdoptCopyRefusesTest, TensorsThatAreNotAsDescribedInWords) {
  EXPECT_THAT(error_of([] { adopt_copy(torch::ones({4}), torch::ones({5}, torch::kHalf)); }),
              HasSubstr("adopt_copy: copy: expected 4 elements"));
  EXPECT_THAT(error_of([] {
                const torch::Tensor low = torch::ones({4}, torch::kHalf);
                adopt_copy(low, low);
              }),
              HasSubstr("adopt_copy: values: expected fp32"));
  EXPECT_THAT(error_of([] {
                const torch::optim::SGDOptions options(0.1);
                const torch::Tensor values = torch::ones({4});
                fused_step(options, 1,
                           Stretch{.values = values, .gradient = values, .adopts_copy = true});
              }),
              HasSubstr("adopts_copy: expected a copy_out"));
}

TEST(BlockHashesTest, DifferWhereABlockDoesAndNowhereElse) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    const torch::Tensor flat = torch::randn({4 * kHashedNumel}).to(dtype);
    const torch::Tensor before = block_hashes(flat);
    EXPECT_EQ(before.numel(), 4);
    for (int64_t element = 0; element < flat.numel(); element += 37) {
      const torch::Tensor changed = flat.clone();
      changed[element] = -changed[element];
      const torch::Tensor differs = block_hashes(changed).ne(before);
      EXPECT_EQ(differs.sum().item<int64_t>(), 1);
      EXPECT_TRUE(differs[element / kHashedNumel].item<bool>());
    }
  }
  EXPECT_THAT(error_of([] { block_hashes(torch::ones({kHashedNumel + 1})); }),
              HasSubstr("expected a 1-D tensor of whole blocks"));
}

}  // namespace
}  // namespace zeropage::optim::adopt_copy_test

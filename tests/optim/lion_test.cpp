#include "zeropage/lion.h"

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/schedulers/step_lr.h>

#include "tests/harness/errors.h"
#include "tests/optim/step_cases.h"

namespace zeropage::lion_test {
namespace {

using namespace zeropage::testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::optim::OptimizerParamGroup;

torch::Tensor parameter_of(std::vector<float> values) {
  return torch::tensor(values).requires_grad_();
}

void step_with(Lion& lion, const torch::Tensor& parameter, std::vector<float> gradient) {
  parameter.mutable_grad() = torch::tensor(gradient).to(parameter.scalar_type());
  lion.step();
}

const torch::Tensor& exp_avg_of(Lion& lion, const torch::Tensor& parameter) {
  return static_cast<LionParamState&>(*lion.state().at(parameter.unsafeGetTensorImpl())).exp_avg();
}

void expect_close(const torch::Tensor& actual, std::vector<double> expected, double tolerance) {
  ASSERT_EQ(actual.numel(), static_cast<int64_t>(expected.size()));
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(actual[static_cast<int64_t>(i)].item<double>(), expected[i], tolerance) << i;
  }
}

LionOptions by_hand() {
  return LionOptions(0.1).betas({0.5, 0.75}).weight_decay(0.5);
}

// Two steps of algorithm 2, computed on paper; decay is 1 - 0.1 * 0.5 = 0.95.
void expect_steps_by_hand(const torch::TensorOptions& as, double tolerance) {
  const auto parameter = torch::tensor({1.0F, -2.0F, 3.0F}).to(as).requires_grad_();
  Lion lion({parameter}, by_hand());
  step_with(lion, parameter, {4, -8, 0});
  // Signs +, -, 0.
  expect_close(parameter, {0.95 - 0.1, -1.9 + 0.1, 2.85}, tolerance);
  expect_close(exp_avg_of(lion, parameter), {1, -2, 0}, tolerance);
  step_with(lion, parameter, {-2, 2, -4});
  // 0.5 * 1 - 1 < 0, -1 + 1 = 0, 0 - 2 < 0.
  expect_close(parameter, {0.8075 + 0.1, -1.71, 2.7075 + 0.1}, tolerance);
  expect_close(exp_avg_of(lion, parameter), {0.25, -1, -1}, tolerance);
}

TEST(LionTest, TakesTheStepsComputedByHand) {
  expect_steps_by_hand(at::kFloat, 1e-6);
}

TEST(LionTest, TakesThemInOtherDtypesByLibtorchsOperators) {
  expect_steps_by_hand(at::kDouble, 1e-12);
  expect_steps_by_hand(at::kBFloat16, 0.02);
}

TEST(LionTest, HasTheBitsOfTheFusedStepAlsoInMatrices) {
  const auto values = random_numbers(60, 1);
  auto parameter = values.clone().view({6, 10}).requires_grad_();
  Lion lion({parameter}, by_hand());
  optim::Stretch stretch{.values = values.clone()};
  stretch.states = optim::make_states(by_hand(), values);
  for (int number = 1; number <= 3; ++number) {
    stretch.gradient = random_numbers(60, static_cast<uint64_t>(10 + number));
    parameter.mutable_grad() = stretch.gradient.view({6, 10});
    lion.step();
    optim::fused_step(by_hand(), number, stretch);
  }
  EXPECT_TRUE(same_bits_of(stretch.values, parameter.detach().view(-1)));
}

TEST(LionTest, StepsATransposedParameterAsItsContiguousCopy) {
  const auto parameter = random_numbers(60, 1).view({6, 10}).t().requires_grad_();
  const auto copy = parameter.detach().clone(at::MemoryFormat::Contiguous).requires_grad_();
  Lion lion({parameter, copy}, by_hand());
  const auto gradient = random_numbers(60, 2).view({10, 6});
  parameter.mutable_grad() = gradient.clone();
  copy.mutable_grad() = gradient.clone();
  lion.step();
  EXPECT_TRUE(torch::allclose(parameter, copy, 1e-6, 1e-7));
}

TEST(LionTest, LeavesParametersWithoutAGradientAlone) {
  const auto with = parameter_of({1});
  const auto without = parameter_of({1});
  Lion lion({with, without}, by_hand());
  step_with(lion, with, {1});
  EXPECT_EQ(without.item<float>(), 1);
  EXPECT_EQ(lion.state().count(without.unsafeGetTensorImpl()), 0);
}

TEST(LionTest, TakesOptionsByGroupAndClosures) {
  const auto fast = parameter_of({1});
  const auto slow = parameter_of({1});
  std::vector<OptimizerParamGroup> groups = {{{fast}, std::make_unique<LionOptions>(0.5)},
                                             {{slow}}};
  Lion lion(groups, LionOptions(0.125));
  const auto loss = lion.step([&] {
    lion.zero_grad();
    auto sum = (fast + slow).sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(loss.item<float>(), 2);
  EXPECT_EQ(fast.item<float>(), 0.5);
  EXPECT_EQ(slow.item<float>(), 0.875);
}

TEST(LionTest, FollowsAScheduler) {
  const auto parameter = parameter_of({1});
  Lion lion({parameter}, LionOptions(0.5));
  torch::optim::StepLR scheduler(lion, /*step_size=*/1, /*gamma=*/0.5);
  std::vector<float> values;
  for (int number = 0; number < 3; ++number) {
    step_with(lion, parameter, {1});
    values.push_back(parameter.item<float>());
    scheduler.step();
  }
  // LibTorch's first scheduler step leaves the rate as it is.
  EXPECT_THAT(values, ElementsAre(1 - 0.5, 1 - 0.5 - 0.5, 1 - 0.5 - 0.5 - 0.25));
}

TEST(LionTest, GoesOnWithTheSameBitsAfterSaveAndLoad) {
  const auto train = [](Lion& lion, const torch::Tensor& parameter, int first, int last) {
    for (int number = first; number < last; ++number) {
      parameter.mutable_grad() = random_numbers(50, static_cast<uint64_t>(number));
      lion.step();
    }
  };
  const auto straight = random_numbers(50, 100).requires_grad_();
  const auto resumed = straight.detach().clone().requires_grad_();
  Lion whole({straight}, by_hand());
  train(whole, straight, 0, 6);

  std::stringstream saved;
  {
    Lion first({resumed}, by_hand());
    train(first, resumed, 0, 3);
    torch::save(first, saved);
  }
  Lion second({resumed}, LionOptions(77));
  torch::load(second, saved);
  EXPECT_EQ(static_cast<LionOptions&>(second.param_groups()[0].options()), by_hand());
  train(second, resumed, 3, 6);
  EXPECT_TRUE(same_bits_of(straight.detach(), resumed.detach()));
}

TEST(LionTest, RefusesInWords) {
  const auto parameter = parameter_of({1});
  EXPECT_EQ(error_of([&] { Lion({parameter}, LionOptions(-1)); }),
            "Lion: lr: expected 0 or more, got -1");
  EXPECT_EQ(error_of([&] {
              Lion({parameter}, LionOptions().betas({0.9, 1.5}));
            }),
            "Lion: betas: expected each in [0, 1), got 0.9 and 1.5");
  EXPECT_EQ(error_of([&] { Lion({parameter}, LionOptions().weight_decay(-0.5)); }),
            "Lion: weight_decay: expected 0 or more, got -0.5");
  Lion lion({parameter}, {});
  parameter.mutable_grad() = torch::ones({1}).to_sparse();
  EXPECT_THAT(error_of([&] { lion.step(); }),
              HasSubstr("expected a dense gradient, got a sparse one"));
}

}  // namespace
}  // namespace zeropage::lion_test

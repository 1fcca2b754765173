#include "zeropage/saved_tensors.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace zeropage::checkpointing::saved_tensors_test {
namespace {

// Writes down what it packs, and gives it back.
class Recorder final : public SavedTensorHooks {
 public:
  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    shapes.push_back(tensor.sizes().vec());
    return keep(tensor);
  }
  std::vector<std::vector<int64_t>> shapes;
};

TEST(SavedTensorsTest, EachSavedTensorGoesThroughTheHooksAndGradientsHaveTheSameBits) {
  torch::manual_seed(0);
  torch::nn::Sequential module(torch::nn::Linear(8, 32), torch::nn::GELU(),
                               torch::nn::Linear(32, 4));
  const auto x = torch::randn({4, 8});
  module->forward(x).square().sum().backward();
  const auto plain = module->parameters()[0].grad().clone();
  module->zero_grad();
  const auto recorder = std::make_shared<Recorder>();
  torch::Tensor loss;
  {
    const SavedTensorScope scope(recorder);
    loss = module->forward(x).square().sum();
  }
  loss.backward();
  EXPECT_TRUE(torch::equal(plain, module->parameters()[0].grad()));
  EXPECT_THAT(recorder->shapes, ::testing::Contains(std::vector<int64_t>{4, 32}));
}

TEST(SavedTensorsTest, TheInnermostScopePacksAndNullMeansWithoutHooks) {
  const auto outer = std::make_shared<Recorder>(), inner = std::make_shared<Recorder>();
  const auto x = torch::ones({3}).requires_grad_();
  {
    const SavedTensorScope scope(outer);
    EXPECT_EQ(SavedTensorScope::current(), outer);
    {
      const SavedTensorScope nested(inner);
      x.exp();
      const SavedTensorScope none(nullptr);
      EXPECT_EQ(SavedTensorScope::current(), nullptr);
      x.exp();
    }
    x.exp();
  }
  x.exp();
  EXPECT_EQ(outer->shapes.size(), 1U);
  EXPECT_EQ(inner->shapes.size(), 1U);
}

TEST(SavedTensorsTest, WhatWasChangedSinceIsRefusedThoughLibTorchDoesNotCheckUnderHooks) {
  const auto x = torch::ones({3}).requires_grad_();
  const auto middle = x * 2;
  torch::Tensor loss;
  {
    const SavedTensorScope scope(std::make_shared<Recorder>());
    loss = middle.square().sum();
  }
  {
    const torch::NoGradGuard no_grad;
    middle.add_(1);
  }
  EXPECT_THAT([&] { loss.backward(); }, ::testing::ThrowsMessage<c10::Error>(::testing::HasSubstr(
                                            "was changed in place since the forward")));
}

TEST(SavedTensorsTest, ABackwardThatCreatesAGraphSavesThroughTheScopeItRunsIn) {
  const auto recorder = std::make_shared<Recorder>();
  const auto x = torch::full({2}, 3.0).requires_grad_();
  const auto y = x.pow(3).sum();
  torch::Tensor gradient;
  {
    const SavedTensorScope scope(recorder);
    gradient = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  }
  EXPECT_FALSE(recorder->shapes.empty());
  gradient.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({2}, 18.0)));
}

TEST(SavedTensorsTest, GraphsOwnWhatIsPacked) {
  std::weak_ptr<Recorder> observed;
  {
    const auto x = torch::ones({3}).requires_grad_();
    const auto recorder = std::make_shared<Recorder>();
    observed = recorder;
    const SavedTensorScope scope(recorder);
    const auto y = x.exp().exp();
  }
  EXPECT_TRUE(observed.expired());
}

}  // namespace
}  // namespace zeropage::checkpointing::saved_tensors_test

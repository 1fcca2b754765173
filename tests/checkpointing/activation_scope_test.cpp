#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/activation_offload.h"
#include "zeropage/bytes.h"
#include "zeropage/checkpoint.h"
#include "zeropage/ledger.h"
#include "zeropage/recompute.h"
#include "zeropage/saved_tensors.h"

namespace zeropage::checkpointing::activation_scope_test {
namespace {

using memory::Kind;
using memory::operator""_KiB;
using ::testing::AllOf;
using ::testing::HasSubstr;
using zeropage::testing::error_of;

using Forward = std::function<torch::Tensor(const torch::Tensor&)>;
// The first is the outermost.
using Policies = std::vector<ActivationPolicy*>;

torch::Tensor forward_under(const Policies& policies, const Forward& forward,
                            const torch::Tensor& x) {
  std::vector<std::unique_ptr<ActivationScope>> scopes;
  for (ActivationPolicy* const policy : policies) {
    scopes.push_back(std::make_unique<ActivationScope>(*policy));
  }
  auto loss = forward(x);
  while (!scopes.empty()) scopes.pop_back();
  return loss;
}

std::vector<torch::Tensor> gradients(torch::nn::Module& module, const torch::Tensor& input,
                                     const Forward& forward, const Policies& policies) {
  torch::manual_seed(7);
  const auto x = input.clone().requires_grad_();
  module.zero_grad(true);
  forward_under(policies, forward, x).backward();
  std::vector<torch::Tensor> found = {x.grad()};
  for (const auto& parameter : module.parameters()) {
    if (parameter.grad().defined()) found.push_back(parameter.grad().clone());
  }
  return found;
}

void expect_same_bits(const std::vector<torch::Tensor>& expected,
                      const std::vector<torch::Tensor>& got) {
  ASSERT_EQ(expected.size(), got.size());
  for (size_t index = 0; index < expected.size(); ++index) {
    EXPECT_TRUE(torch::equal(expected[index], got[index])) << index;
  }
}

// A test's own ledger, on which nothing is offloaded before or after.
class ActivationScopeTest : public ::testing::Test {
 protected:
  ActivationScopeTest() {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
  ~ActivationScopeTest() override { EXPECT_EQ(held(Kind::kActivationOffloaded), 0); }

  int64_t held(Kind kind) const { return ledger_->now()[kind]; }

  // Selectively, and by a budget, each in both orders of nesting.
  void expect_the_plain_bits(torch::nn::Module& module, const torch::Tensor& x,
                             const Forward& forward) {
    gradients(module, x, forward, {});
    ledger_->reset_peak();
    const auto plain = gradients(module, x, forward, {});
    const int64_t peak = ledger_->activation_peak();
    for (const auto& budget : {std::optional<int64_t>(), std::optional(2 * peak)}) {
      for (const bool recompute_is_inside : {true, false}) {
        SCOPED_TRACE(c10::str(budget ? "by a budget, " : "selectively, ",
                              recompute_is_inside ? "within offload" : "around offload"));
        Recompute recompute(RecomputeOptions{.budget_bytes = budget, .least_bytes = 1});
        ActivationOffload offload({.least_bytes = 0});
        const Policies policies =
            recompute_is_inside ? Policies{&offload, &recompute} : Policies{&recompute, &offload};
        for (int step = 0; step < 3; ++step) {
          expect_same_bits(plain, gradients(module, x, forward, policies));
        }
        EXPECT_GT(offload.statistics().copies, 0);
        EXPECT_EQ(offload.statistics().host_bytes, 0);
        EXPECT_EQ(recompute.statistics().forwards, 3);
        EXPECT_TRUE(budget || recompute.statistics().replays > 0);
      }
    }
  }

  const std::shared_ptr<memory::Ledger> ledger_ = std::make_shared<memory::Ledger>();
  const memory::LedgerScope scope_{ledger_};
};

TEST_F(ActivationScopeTest, RecomputeAndOffloadComposeInEitherOrderWithThePlainBits) {
  torch::nn::Sequential dropout(torch::nn::Linear(16, 64), torch::nn::GELU(),
                                torch::nn::Dropout(0.4), torch::nn::Linear(64, 64),
                                torch::nn::Tanh(), torch::nn::Linear(64, 4));
  expect_the_plain_bits(*dropout, torch::randn({32, 16}),
                        [&](const torch::Tensor& x) { return dropout->forward(x).square().sum(); });
  zeropage::testing::Transformer transformer;
  expect_the_plain_bits(*transformer, torch::randn({6, 7}), [&](const torch::Tensor& x) {
    return transformer->forward(x).pow(2).sum();
  });
  zeropage::testing::ConvNet convolutions;
  expect_the_plain_bits(*convolutions, torch::randn({6, 7}), [&](const torch::Tensor& x) {
    return convolutions->forward(x).pow(2).sum();
  });
}

struct Bytes {
  int64_t peak = 0;       // of activations that are here
  int64_t here = 0;       // after forward
  int64_t offloaded = 0;  // after forward
  torch::Tensor gradient;
};

// One step of a stack of Linear and GELU, of activations of 64 KiB.
Bytes bytes_of_stack(int layers, const Policies& policies) {
  const auto ledger = memory::Ledger::current();
  torch::manual_seed(3);
  torch::nn::Sequential module;
  for (int layer = 0; layer < layers; ++layer) {
    module->push_back(torch::nn::Linear(32, 32));
    module->push_back(torch::nn::GELU());
  }
  for (auto& parameter : module->parameters()) {
    const memory::KindScope kind(Kind::kGradient);
    parameter.mutable_grad() = torch::zeros_like(parameter);
  }
  for (auto& parameter : module->parameters()) memory::assign(parameter, Kind::kParameter);
  const auto x = torch::ones({512, 32});
  const int64_t before = ledger->now().activations();
  ledger->reset_peak();
  const auto loss = forward_under(
      policies, [&](const torch::Tensor& in) { return module->forward(in).sum(); }, x);
  Bytes bytes;
  bytes.here = ledger->now().activations() - before;
  bytes.offloaded = ledger->now()[Kind::kActivationOffloaded];
  loss.backward();
  bytes.peak = ledger->activation_peak() - before;
  const memory::KindScope kind(Kind::kGradient);
  bytes.gradient = module->parameters()[0].grad().clone();
  return bytes;
}

// A layer saves the inputs of its Linear and of its GELU. The first is cheap to compute again, and the
// second is not, so it leaves.
TEST_F(ActivationScopeTest, WhatRecomputeDropsIsNowhereAndWhatItKeepsLeaves) {
  constexpr int kLayers = 16;
  Recompute recompute;
  ActivationOffload offload;
  const Bytes plain = bytes_of_stack(kLayers, {});
  const Bytes dropped = bytes_of_stack(kLayers, {&recompute});
  const Bytes left = bytes_of_stack(kLayers, {&offload});
  EXPECT_GE(plain.here, (2 * kLayers - 1) * 64_KiB);
  EXPECT_GE(dropped.here, kLayers * 64_KiB);
  EXPECT_EQ(left.offloaded, 2 * kLayers * 64_KiB);
  for (const auto& policies : {Policies{&offload, &recompute}, Policies{&recompute, &offload}}) {
    const Bytes both = bytes_of_stack(kLayers, policies);
    EXPECT_TRUE(torch::equal(both.gradient, plain.gradient));
    EXPECT_EQ(both.offloaded, (kLayers + 1) * 64_KiB) << "inputs of GELUs, and of the first Linear";
    EXPECT_LE(both.here, 8_KiB) << "the loss, and what is too small to leave";
    EXPECT_LE(both.peak, dropped.peak / 2);
    // A layer's output comes back by its GELU, whose input comes from the host.
    EXPECT_LE(both.peak, left.peak + 64_KiB);
    const Bytes deeper = bytes_of_stack(4 * kLayers, policies);
    EXPECT_LE(deeper.peak, both.peak * 21 / 20);
  }
}

TEST_F(ActivationScopeTest, ABudgetIsOfAllThatIsKeptWhereverItLies) {
  constexpr int kLayers = 16;
  ActivationOffload offload;
  const Bytes plain = bytes_of_stack(kLayers, {});
  const int64_t all = plain.peak;
  for (const int64_t percent : {80, 60}) {
    Recompute recompute(
        RecomputeOptions::budget(ledger_->now().activations() + all * percent / 100));
    for (int step = 0; step < 3; ++step) {
      const Bytes both = bytes_of_stack(kLayers, {&recompute, &offload});
      EXPECT_TRUE(torch::equal(both.gradient, plain.gradient));
      EXPECT_LE(both.offloaded, all * percent / 100) << percent << " % in step " << step;
      EXPECT_GT(both.offloaded, all * percent / 400) << percent << " % in step " << step;
      EXPECT_LE(both.peak, all * percent / 100) << percent << " % in step " << step;
    }
  }
}

TEST_F(ActivationScopeTest, AScopeWithinAnotherConcernsItsPartOfTheForward) {
  const auto x = torch::randn({64, 64}).requires_grad_();
  Recompute recompute(RecomputeOptions{.least_bytes = 1});
  ActivationOffload offload({.least_bytes = 0});
  const auto forward = [&](bool recomputed, bool offloaded) {
    std::optional<ActivationScope> dropping, leaving;
    if (recomputed) dropping.emplace(recompute);
    const auto first = x.matmul(x).sin();  // saves x twice, and the product
    if (offloaded) leaving.emplace(offload);
    const auto second = first.matmul(x).cos();
    leaving.reset();
    return second.matmul(x).exp().sum();
  };
  const auto plain = torch::autograd::grad({forward(false, false)}, {x});
  const auto loss = forward(true, true);
  // The inner part keeps its product alone: `first` is cheap, and x is a leaf.
  EXPECT_EQ(offload.statistics().host_bytes, 64 * 64 * 4);
  expect_same_bits(plain, torch::autograd::grad({loss}, {x}));
}

TEST_F(ActivationScopeTest, RegionsWithinHandTheirInputsOn) {
  zeropage::testing::Transformer module;
  const auto x = torch::randn({6, 7});
  const Forward forward = [&](const torch::Tensor& in) {
    const auto region = [&](const torch::Tensor& t) { return module->forward(t); };
    return checkpoint(region, in.sin()).pow(2).sum();
  };
  const auto plain = gradients(*module, x, forward, {});
  for (const bool recompute_is_inside : {true, false}) {
    Recompute recompute(RecomputeOptions{.least_bytes = 1});
    ActivationOffload offload({.least_bytes = 0});
    expect_same_bits(plain, gradients(*module, x, forward,
                                      recompute_is_inside ? Policies{&offload, &recompute}
                                                          : Policies{&recompute, &offload}));
    EXPECT_GT(offload.statistics().copies, 0);
  }
}

TEST_F(ActivationScopeTest, ARetainedGraphComesBackTwice) {
  torch::nn::Linear linear(8, 24);
  const auto x = torch::randn({4, 8}).requires_grad_();
  const Forward forward = [&](const torch::Tensor& t) {
    const auto parts = linear(t).tanh().sin().chunk(3, -1);
    return (parts[0] * parts[1] * parts[2]).exp().sum();
  };
  const auto plain = torch::autograd::grad({forward(x)}, {x}, {}, true);
  Recompute recompute(RecomputeOptions{.least_bytes = 1});
  ActivationOffload offload({.least_bytes = 0});
  const auto loss = forward_under({&offload, &recompute}, forward, x);
  const int64_t left = held(Kind::kActivationOffloaded);
  EXPECT_GT(left, 0);
  for (int time = 0; time < 2; ++time) {
    expect_same_bits(plain, torch::autograd::grad({loss}, {x}, {}, true));
    EXPECT_EQ(held(Kind::kRecompute), 0);
    EXPECT_EQ(held(Kind::kActivationOffloaded), left);
  }
}

// `product` has left when it is overwritten, and `sum` takes it to be computed again.
TEST_F(ActivationScopeTest, WhatTheForwardOverwritesIsComputedFromAsItWas) {
  const auto x = torch::randn({64}).requires_grad_();
  const auto weight = torch::randn({64, 64});
  const auto run = [&](const Policies& policies) {
    const auto loss = forward_under(
        policies,
        [&](const torch::Tensor& in) {
          const auto product = weight.mv(in);
          const auto unused = product.sin();  // saves the product, which is kept
          const auto sum = product + 1;
          const auto cosine = sum.cos();  // saves the sum, which is dropped
          product.detach().zero_();
          return cosine.sum();
        },
        x);
    return torch::autograd::grad({loss}, {x});
  };
  Recompute recompute(RecomputeOptions{.least_bytes = 1});
  ActivationOffload offload({.least_bytes = 0});
  expect_same_bits(run({}), run({&offload, &recompute}));
  EXPECT_GT(offload.statistics().copies, 1) << "the product, and a copy of it";
}

TEST_F(ActivationScopeTest, WhatChangedAfterTheForwardIsRefused) {
  const auto x = torch::randn({64}).requires_grad_();
  const auto weight = torch::randn({64, 64});
  Recompute recompute(RecomputeOptions{.least_bytes = 1});
  ActivationOffload offload({.least_bytes = 0});
  torch::Tensor product;
  const Forward forward = [&](const torch::Tensor& in) {
    product = weight.mv(in);
    return product.sin().sum();
  };
  const auto loss = forward_under({&offload, &recompute}, forward, x);
  product.detach().zero_();
  EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("was changed in place"));
}

TEST_F(ActivationScopeTest, PartitionedCheckpointsPackWithinTheirScopeAlone) {
  Recompute recompute;
  PartitionedCheckpoints partitioned(PartitionOptions{});
  const ActivationScope around(recompute);
  const auto before = SavedTensorScope::current();
  {
    const ActivationScope scope(partitioned);
    EXPECT_EQ(SavedTensorScope::current(), partitioned.hooks());
  }
  EXPECT_EQ(SavedTensorScope::current(), before);
}

// Functions return them, and vectors have them.
TEST_F(ActivationScopeTest, PoliciesMoveAndWhatWasMovedFromIsRefusedByName) {
  const auto x = torch::randn({64, 64});
  torch::nn::Linear linear(64, 64);
  const Forward forward = [&](const torch::Tensor& in) { return linear(in.sin()).sin().sum(); };
  const auto plain = gradients(*linear, x, forward, {});
  const auto expect_moves = [&](auto policy, auto other, const char* name) {
    expect_same_bits(plain, gradients(*linear, x, forward, {&policy}));
    auto moved = std::move(policy);
    expect_same_bits(plain, gradients(*linear, x, forward, {&moved}));
    EXPECT_THAT(error_of([&] { const ActivationScope scope(policy); }),
                AllOf(HasSubstr(name), HasSubstr("was moved from")));
    other = std::move(moved);
    expect_same_bits(plain, gradients(*linear, x, forward, {&other}));
    policy = std::move(other);
    expect_same_bits(plain, gradients(*linear, x, forward, {&policy}));
    std::vector<decltype(policy)> several;
    several.push_back(std::move(policy));
    expect_same_bits(plain, gradients(*linear, x, forward, {&several.front()}));
    // Graphs live on without their policy.
    const auto in = x.clone().requires_grad_();
    linear->zero_grad();
    const auto loss = forward_under({&several.front()}, forward, in);
    several.clear();
    loss.backward();
    expect_same_bits({plain.front()}, {in.grad()});
  };
  const RecomputeOptions recompute{.least_bytes = 1};
  expect_moves(Recompute(recompute), Recompute(), "Recompute");
  expect_moves(ActivationOffload({.least_bytes = 0}), ActivationOffload(), "ActivationOffload");
  expect_moves(PartitionedCheckpoints(PartitionOptions{}),
               PartitionedCheckpoints(PartitionOptions{}), "PartitionedCheckpoints");
}

TEST_F(ActivationScopeTest, OptionsThatMakeNoSenseAreRefusedWithTheNameOfTheirClass) {
  EXPECT_THAT(error_of([] { Recompute(RecomputeOptions{.least_bytes = -1}); }),
              HasSubstr("Recompute: expected least_bytes of 0 or more, got -1"));
  EXPECT_THAT(error_of([] { Recompute(RecomputeOptions::budget(0)); }),
              HasSubstr("Recompute: expected a budget of 1 byte or more, got 0"));
  EXPECT_THAT(error_of([] { ActivationOffload({.least_bytes = -1}); }),
              HasSubstr("ActivationOffload: expected bytes of 0 or more, got least_bytes -1"));
}

TEST_F(ActivationScopeTest, StatisticsAreALineOfWords) {
  Recompute recompute(RecomputeOptions{.least_bytes = 1});
  const auto x = torch::ones({64, 64}).requires_grad_();
  forward_under(
      {&recompute}, [](const torch::Tensor& in) { return in.sin().sin().sum(); }, x)
      .backward();
  EXPECT_THAT(to_string(recompute.statistics()), HasSubstr("replays after 1 forwards"));
}

}  // namespace
}  // namespace zeropage::checkpointing::activation_scope_test

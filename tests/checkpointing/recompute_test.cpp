#include "zeropage/recompute.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "zeropage/bytes.h"
#include "zeropage/checkpoint.h"
#include "zeropage/ledger.h"

namespace zeropage::checkpointing::recompute_test {
namespace {

using Forward = std::function<torch::Tensor(const torch::Tensor&)>;
using memory::Ledger;

std::vector<torch::Tensor> gradients_of(torch::nn::Module& module, const torch::Tensor& input,
                                        const Forward& forward, Recompute* recompute) {
  torch::manual_seed(7);
  const auto x = input.clone().requires_grad_(input.is_floating_point());
  module.zero_grad(true);
  torch::Tensor loss;
  {
    std::optional<ActivationScope> scope;
    if (recompute != nullptr) scope.emplace(*recompute);
    loss = forward(x).square().sum();
  }
  loss.backward();
  std::vector<torch::Tensor> gradients;
  if (x.requires_grad()) gradients.push_back(x.grad());
  for (const auto& parameter : module.parameters()) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad().clone());
  }
  for (const auto& buffer : module.buffers()) gradients.push_back(buffer.clone());
  return gradients;
}

void expect_same_bits(const std::vector<torch::Tensor>& expected,
                      const std::vector<torch::Tensor>& got) {
  ASSERT_EQ(expected.size(), got.size());
  for (size_t index = 0; index < expected.size(); ++index) {
    EXPECT_TRUE(torch::equal(expected[index], got[index])) << index;
  }
}

RecomputeOptions everything_small(std::optional<int64_t> budget) {
  RecomputeOptions options;
  options.budget_bytes = budget;
  options.least_bytes = 1;
  return options;
}

// Selectively, and for several steps under a budget that leaves little room.
void expect_recompute_changes_no_bit(torch::nn::Module& module, const torch::Tensor& input,
                                     const Forward& forward) {
  std::vector<torch::Tensor> buffers;
  for (const auto& buffer : module.buffers()) buffers.push_back(buffer.clone());
  const auto reset = [&] {
    const torch::NoGradGuard no_grad;
    const auto now = module.buffers();
    for (size_t index = 0; index < now.size(); ++index) {
      torch::Tensor buffer = now[index];
      buffer.copy_(buffers[index]);
    }
  };
  gradients_of(module, input, forward, nullptr);
  reset();
  Ledger::current()->reset_peak();
  const int64_t base = Ledger::current()->now().activations();
  const auto plain = gradients_of(module, input, forward, nullptr);
  const int64_t peak = Ledger::current()->activation_peak() - base;
  const auto run_steps = [&](std::optional<int64_t> budget) {
    Recompute recompute(everything_small(budget));
    for (int step = 0; step < 3; ++step) {
      reset();
      expect_same_bits(plain, gradients_of(module, input, forward, &recompute));
    }
  };
  const auto replays = recompute_statistics().replays;
  run_steps({});
  EXPECT_GT(recompute_statistics().replays, replays);
  // The tightest that is not refused.
  for (int64_t budget = base + peak * 9 / 10;; budget += std::max<int64_t>(peak / 20, 1)) {
    ASSERT_LT(budget, base + 2 * peak);
    const std::string refusal = testing::error_of([&] { run_steps(budget); });
    if (refusal.empty()) break;
    EXPECT_THAT(refusal, ::testing::HasSubstr("raise the budget"));
  }
}

TEST(RecomputeTest, DropoutNormsAndActivationsComeBackBitForBit) {
  torch::nn::Sequential module(
      torch::nn::Linear(16, 64), torch::nn::GELU(), torch::nn::Dropout(0.4),
      torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})), torch::nn::Linear(64, 64),
      torch::nn::Tanh(), torch::nn::Linear(64, 4));
  expect_recompute_changes_no_bit(*module, torch::randn({32, 16}),
                                  [&](const torch::Tensor& x) { return module->forward(x); });
}

// What a step keeps from forward to backward if all that can be made again is dropped.
int64_t least_kept_by(const Forward& forward) {
  torch::nn::Linear first(64, 64);
  Recompute recompute(everything_small({}));
  const torch::Tensor x = torch::randn({256, 64});
  const int64_t base = Ledger::current()->now().activations();
  torch::Tensor loss;
  {
    const ActivationScope scope(recompute);
    loss = forward(first(x)).square().sum();
  }
  const int64_t kept = Ledger::current()->now().activations() - base;
  loss.backward();
  return kept;
}

TEST(RecomputeTest, WhatAGeneratorOfTheScriptsOwnDrewIsDroppedAndDrawnAgain) {
  torch::nn::Sequential module(torch::nn::Linear(16, 64), torch::nn::Linear(64, 4));
  at::Generator generator;
  const auto mask = [&](const torch::Tensor& x) {
    return x * (torch::rand(x.sizes(), generator) > 0.5);
  };
  expect_recompute_changes_no_bit(*module, torch::randn({32, 16}), [&](const torch::Tensor& x) {
    generator = at::detail::createCPUGenerator(3);
    return module[1]->as<torch::nn::Linear>()->forward(
        mask(torch::gelu(module[0]->as<torch::nn::Linear>()->forward(x))));
  });
  generator = at::detail::createCPUGenerator(3);
  const auto deep = [](const auto& draw) {
    return [&draw](torch::Tensor x) {
      x = draw(x);
      for (int layer = 0; layer < 6; ++layer) x = torch::tanh(x) * 2;
      return x;
    };
  };
  const auto from_default = [&](const torch::Tensor& x) {
    return x * (torch::rand(x.sizes()) > 0.5);
  };
  EXPECT_EQ(least_kept_by(deep(mask)), least_kept_by(deep(from_default)));
}

TEST(RecomputeTest, AConvolutionalNetWithBatchNormAndInPlaceReluComesBackBitForBit) {
  struct Net : torch::nn::Module {
    torch::nn::Conv2d a{register_module(
        "a", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1).bias(false)))};
    torch::nn::BatchNorm2d norm{register_module("norm", torch::nn::BatchNorm2d(8))};
    torch::nn::Conv2d b{register_module(
        "b", torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 3, 3).padding(1).bias(false)))};
    torch::nn::BatchNorm2d last{register_module("last", torch::nn::BatchNorm2d(3))};
    torch::Tensor forward(const torch::Tensor& x) {
      return torch::gelu(last(b(norm(a(x)).relu_()).sigmoid()) + x).sin();
    }
  } net;
  expect_recompute_changes_no_bit(net, torch::randn({4, 3, 8, 8}),
                                  [&](const torch::Tensor& x) { return net.forward(x); });
}

TEST(RecomputeTest, LstmMultiheadAttentionAndEmbeddingsComeBackBitForBit) {
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(6, 8).num_layers(2).dropout(0.2));
  expect_recompute_changes_no_bit(*lstm, torch::randn({5, 3, 6}), [&](const torch::Tensor& x) {
    return std::get<0>(lstm->forward(x)).tanh().exp();
  });
  torch::nn::MultiheadAttention attention(torch::nn::MultiheadAttentionOptions(8, 2).dropout(0.1));
  expect_recompute_changes_no_bit(*attention, torch::randn({5, 3, 8}), [&](const torch::Tensor& x) {
    return std::get<0>(attention->forward(x, x, x)).sigmoid();
  });
  torch::nn::Sequential words(torch::nn::Embedding(10, 8), torch::nn::Linear(8, 8),
                              torch::nn::Tanh(), torch::nn::Linear(8, 10));
  words[1]->as<torch::nn::Linear>()->weight.set_requires_grad(false);
  expect_recompute_changes_no_bit(*words, torch::arange(6), [&](const torch::Tensor& x) {
    return torch::log_softmax(words->forward(x).exp(), -1);
  });
}

// A block of a transformer, so that there is much to choose from.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(int64_t d)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({d})))),
        qkv(register_module("qkv", torch::nn::Linear(d, 3 * d))),
        out(register_module("out", torch::nn::Linear(d, d))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({d})))),
        up(register_module("up", torch::nn::Linear(d, 4 * d))),
        down(register_module("down", torch::nn::Linear(4 * d, d))) {}
  torch::Tensor forward(torch::Tensor x) {
    const int64_t batch = x.size(0), length = x.size(1), d = x.size(2);
    const auto parts = qkv(norm(x)).chunk(3, -1);
    const auto by_head = [&](const torch::Tensor& t) {
      return t.view({batch, length, 4, d / 4}).transpose(1, 2);
    };
    const auto mixed = at::scaled_dot_product_attention(by_head(parts[0]), by_head(parts[1]),
                                                        by_head(parts[2]), {}, 0.0, true);
    x = x + out(mixed.transpose(1, 2).reshape({batch, length, d}));
    return x + down(torch::gelu(up(norm2(x))));
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear qkv, out;
  torch::nn::LayerNorm norm2;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct Transformer : torch::nn::Module {
  explicit Transformer(int64_t layers, int64_t d) {
    for (int64_t layer = 0; layer < layers; ++layer) blocks->push_back(Block(d));
    register_module("blocks", blocks);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return x;
  }
  torch::nn::ModuleList blocks;
};

TEST(RecomputeTest, ABudgetIsKeptFromTheFirstStepOnAndTheForecastIsNearTheMeasurement) {
  Transformer net(6, 64);
  const auto x = torch::randn({16, 64, 64});
  const auto forward = [&](const torch::Tensor& t) { return net.forward(t); };
  Ledger& ledger = *Ledger::current();
  gradients_of(net, x, forward, nullptr);
  ledger.reset_peak();
  const auto plain = gradients_of(net, x, forward, nullptr);
  const int64_t all = ledger.activation_peak();
  for (const int64_t percent : {80, 60, 45}) {
    const int64_t budget = all * percent / 100;
    Recompute recompute(RecomputeOptions::budget(budget));
    for (int step = 0; step < 3; ++step) {
      ledger.reset_peak();
      expect_same_bits(plain, gradients_of(net, x, forward, &recompute));
      EXPECT_LE(static_cast<double>(ledger.activation_peak()), 1.02 * static_cast<double>(budget))
          << percent << " % in step " << step;
      if (step == 0) continue;
      ASSERT_TRUE(recompute.forecast_peak_bytes());
      EXPECT_NEAR(static_cast<double>(*recompute.forecast_peak_bytes()) /
                      static_cast<double>(ledger.activation_peak()),
                  1.0, 0.04)
          << percent << " % in step " << step << ": forecast " << *recompute.forecast_peak_bytes()
          << ", measured " << ledger.activation_peak() << '\n'
          << recompute.plan_table();
    }
  }
}

TEST(RecomputeTest, ABudgetBelowWhatIsReachableIsRefusedWithTheFigure) {
  Transformer net(2, 32);
  const auto x = torch::randn({2, 16, 32});
  const auto forward = [&](const torch::Tensor& t) { return net.forward(t); };
  Recompute recompute(everything_small(1000));
  gradients_of(net, x, forward, &recompute);
  const std::string error = testing::error_of([&] { gradients_of(net, x, forward, &recompute); });
  EXPECT_THAT(error, ::testing::HasSubstr("(985 bytes) of activations: expected at least"));
  EXPECT_THAT(error, ::testing::HasSubstr("raise the budget"));
}

// Runs as rank 0 and as another rank, one after the other: what rank 0 tells is what the other one is told.
TEST(RecomputeTest, TheRanksFollowThePlanOrTheRefusalOfRankZero) {
  Transformer net(4, 32);
  const auto x = torch::randn({2, 16, 32});
  const auto forward = [&](const torch::Tensor& t) { return net.forward(t); };
  gradients_of(net, x, forward, nullptr);
  Ledger::current()->reset_peak();
  const auto plain = gradients_of(net, x, forward, nullptr);
  const int64_t reachable = 2 * Ledger::current()->activation_peak();
  const int64_t unreachable = 1000;
  const auto run = [&](int64_t budget, std::function<void(const at::Tensor&)> agree) {
    RecomputeOptions options = everything_small(budget);
    options.agree = std::move(agree);
    Recompute recompute(options);
    const std::string error = testing::error_of([&] {
      for (int step = 0; step < 3; ++step) {
        expect_same_bits(plain, gradients_of(net, x, forward, &recompute));
      }
    });
    return std::make_pair(error, recompute.plan_table());
  };
  for (const int64_t of_rank_zero : {reachable, unreachable}) {
    for (const int64_t of_other : {reachable, unreachable}) {
      std::vector<at::Tensor> told;
      const auto zero =
          run(of_rank_zero, [&](const at::Tensor& decision) { told.push_back(decision.clone()); });
      size_t next = 0;
      const auto other =
          run(of_other, [&](const at::Tensor& decision) { decision.copy_(told.at(next++)); });
      EXPECT_EQ(next, told.size());
      EXPECT_EQ(zero.first.empty(), of_rank_zero == reachable) << zero.first;
      EXPECT_EQ(other.first.empty(), of_rank_zero == reachable) << other.first;
      EXPECT_EQ(other.second.empty(), of_rank_zero == unreachable);
      if (of_rank_zero == unreachable) {
        EXPECT_THAT(other.first, ::testing::HasSubstr("raise the budget"));
      }
    }
  }
}

TEST(RecomputeTest, AForwardOfOtherShapesIsMeasuredAnew) {
  Transformer net(4, 32);
  const auto forward = [&](const torch::Tensor& t) { return net.forward(t); };
  const auto small = torch::randn({2, 16, 32}), large = torch::randn({4, 16, 32});
  const auto plain_small = gradients_of(net, small, forward, nullptr);
  Ledger& ledger = *Ledger::current();
  ledger.reset_peak();
  const auto plain_large = gradients_of(net, large, forward, nullptr);
  Recompute recompute(everything_small(ledger.activation_peak() * 95 / 100));
  for (const bool is_large : {false, false, true, true, true, false}) {
    expect_same_bits(is_large ? plain_large : plain_small,
                     gradients_of(net, is_large ? large : small, forward, &recompute));
  }
}

TEST(RecomputeTest, RetainedGraphsAreUsedTwiceAndSharedStoragesComeBackOnce) {
  torch::nn::Linear linear(8, 24);
  const auto x = torch::randn({4, 8}).requires_grad_();
  const auto function = [&](const torch::Tensor& t) {
    const auto parts = linear(t).tanh().sin().chunk(3, -1);
    return (parts[0] * parts[1] * parts[2]).exp();
  };
  const auto plain = function(x).sum();
  Recompute recompute(everything_small({}));
  torch::Tensor loss;
  {
    const ActivationScope scope(recompute);
    loss = function(x).sum();
  }
  for (int time = 0; time < 2; ++time) {
    EXPECT_TRUE(torch::equal(torch::autograd::grad({plain}, {x}, {}, true)[0],
                             torch::autograd::grad({loss}, {x}, {}, true)[0]));
    EXPECT_EQ(Ledger::current()->now()[memory::Kind::kRecompute], 0);
  }
}

TEST(RecomputeTest, WhatIsOverwrittenInTheForwardIsCopiedAndWhatIsAfterwardsRefused) {
  const auto run = [](Recompute* recompute, bool later) {
    auto input = torch::full({64}, 2.0);
    const auto x = torch::ones({64}).requires_grad_();
    torch::Tensor loss;
    {
      std::optional<ActivationScope> scope;
      if (recompute != nullptr) scope.emplace(*recompute);
      const auto y = (x + input).sin();  // saves x + input, which takes `input` to compute again
      if (!later) input.zero_();
      loss = y.sum();
    }
    if (later) input.zero_();
    loss.backward();
    return x.grad();
  };
  Recompute recompute(everything_small({}));
  EXPECT_TRUE(torch::equal(run(nullptr, false), run(&recompute, false)));
  EXPECT_THAT(testing::error_of([&] { run(&recompute, true); }),
              ::testing::HasSubstr("was changed in place since the forward"));
}

TEST(RecomputeTest, RegionsWithinAreLeftToThemselvesAndGraphsThatNeverRunFreeEverything) {
  Transformer net(3, 32);
  const auto x = torch::randn({2, 16, 32});
  const auto forward = [&](const torch::Tensor& t) {
    return checkpoint([&](const torch::Tensor& s) { return net.forward(s); }, t.sin()).sin();
  };
  Recompute recompute(everything_small({}));
  expect_same_bits(gradients_of(net, x, forward, nullptr),
                   gradients_of(net, x, forward, &recompute));
  const int64_t before = Ledger::current()->now().activations();
  {
    const ActivationScope scope(recompute);
    forward(x);
  }
  EXPECT_EQ(Ledger::current()->now().activations(), before);
}

}  // namespace
}  // namespace zeropage::checkpointing::recompute_test

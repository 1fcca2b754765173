#include "zeropage/checkpoint.h"

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "zeropage/ledger.h"
#include "zeropage/recompute.h"
#include "zeropage/saved_tensors.h"

namespace zeropage::checkpointing::checkpoint_test {
namespace {

using Forward = std::function<torch::Tensor(torch::Tensor)>;

struct Gradients {
  torch::Tensor output;
  std::vector<torch::Tensor> of;
};

// Gradients of sum(forward(x)^2) for x and the module's parameters, drawn from one seed.
Gradients gradients_of(const torch::nn::Module& module, const torch::Tensor& input,
                       const Forward& forward) {
  torch::manual_seed(7);
  const auto x = input.clone().requires_grad_(input.is_floating_point());
  for (auto& parameter : module.parameters()) parameter.mutable_grad() = torch::Tensor();
  const auto output = forward(x);
  output.square().sum().backward();
  Gradients gradients{output.detach().clone(), {}};
  if (x.requires_grad()) gradients.of.push_back(x.grad().clone());
  for (auto& parameter : module.parameters()) {
    gradients.of.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::Tensor());
  }
  for (const auto& buffer : module.buffers()) gradients.of.push_back(buffer.clone());
  return gradients;
}

void expect_same_bits(const Gradients& expected, const Gradients& got) {
  EXPECT_TRUE(torch::equal(expected.output, got.output));
  ASSERT_EQ(expected.of.size(), got.of.size());
  for (size_t index = 0; index < expected.of.size(); ++index) {
    ASSERT_EQ(expected.of[index].defined(), got.of[index].defined()) << index;
    if (!expected.of[index].defined()) continue;
    EXPECT_TRUE(torch::equal(expected.of[index], got.of[index])) << "gradient or buffer " << index;
  }
}

// The forward as it is, and in one region.
void expect_a_region_changes_no_bit(torch::nn::Module& module, const torch::Tensor& input,
                                    const Forward& forward) {
  std::vector<torch::Tensor> before;
  for (const auto& buffer : module.buffers()) before.push_back(buffer.clone());
  const Gradients plain = gradients_of(module, input, forward);
  {
    const torch::NoGradGuard no_grad;
    const auto buffers = module.buffers();
    for (size_t index = 0; index < before.size(); ++index) {
      torch::Tensor buffer = buffers[index];
      buffer.copy_(before[index]);
    }
  }
  const auto replays = recompute_statistics().replays;
  expect_same_bits(plain, gradients_of(module, input, [&](const torch::Tensor& x) {
                     return checkpoint({.check = RecomputeCheck::kValues}, forward, x);
                   }));
  EXPECT_GT(recompute_statistics().replays, replays);
}

TEST(CheckpointTest, DropoutIsRepeatedWithTheSameMasks) {
  torch::nn::Sequential module(torch::nn::Linear(8, 16), torch::nn::GELU(), torch::nn::Dropout(0.5),
                               torch::nn::Linear(16, 4), torch::nn::Dropout(0.3));
  expect_a_region_changes_no_bit(*module, torch::randn({5, 8}),
                                 [&](const torch::Tensor& x) { return module->forward(x); });
}

// A mask from a generator of the script's own, made anew for each gradients_of().
class OwnMask {
 public:
  void begin() { generator_ = at::detail::createCPUGenerator(3); }
  torch::Tensor of(const torch::Tensor& x) {
    return x * (torch::rand(x.sizes(), generator_) > 0.5);
  }
  // Once the run is over.
  int64_t next() { return torch::randint(1 << 30, {1}, generator_).item<int64_t>(); }

 private:
  at::Generator generator_;
};

TEST(CheckpointTest, AGeneratorOfTheScriptsOwnDrawsTheSameMaskAgainAndGoesOnFromWhereItWas) {
  torch::nn::Linear a(8, 16), b(16, 4);
  torch::nn::Sequential module(a, b);
  OwnMask mask;
  const auto forward = [&](const torch::Tensor& x) { return b(mask.of(torch::gelu(a(x)))); };
  const torch::Tensor input = torch::randn({5, 8});
  mask.begin();
  const Gradients plain = gradients_of(*module, input, forward);
  const int64_t next = mask.next();
  mask.begin();
  expect_same_bits(plain, gradients_of(*module, input, [&](const torch::Tensor& x) {
                     return checkpoint({.check = RecomputeCheck::kValues}, forward, x);
                   }));
  EXPECT_EQ(mask.next(), next) << "one region";
  mask.begin();
  expect_same_bits(plain, gradients_of(*module, input, [&](const torch::Tensor& x) {
                     return checkpoint(
                         [&](const torch::Tensor& x) { return checkpoint(forward, x); }, x);
                   }));
  EXPECT_EQ(mask.next(), next) << "a region in a region";
}

TEST(CheckpointTest, BatchNormStatisticsAreUpdatedOnceByAResidualNet) {
  struct Net : torch::nn::Module {
    torch::nn::Conv2d a{register_module(
        "a", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 3, 3).padding(1).bias(false)))};
    torch::nn::BatchNorm2d norm{register_module("norm", torch::nn::BatchNorm2d(3))};
    torch::nn::Conv2d b{register_module(
        "b", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 3, 3).padding(1).bias(false)))};
    torch::nn::BatchNorm2d last{register_module("last", torch::nn::BatchNorm2d(3))};
    torch::Tensor forward(const torch::Tensor& x) {
      return torch::relu(last(b(norm(a(x)).relu_())) + x);
    }
  } net;
  expect_a_region_changes_no_bit(net, torch::randn({4, 3, 6, 6}),
                                 [&](const torch::Tensor& x) { return net.forward(x); });
  EXPECT_EQ(net.norm->num_batches_tracked.item<int64_t>(), 1);
}

TEST(CheckpointTest, LstmAndMultiheadAttentionAreRepeatedBitForBit) {
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(6, 8).num_layers(2).dropout(0.2));
  expect_a_region_changes_no_bit(*lstm, torch::randn({5, 3, 6}), [&](const torch::Tensor& x) {
    return std::get<0>(lstm->forward(x));
  });
  torch::nn::MultiheadAttention attention(torch::nn::MultiheadAttentionOptions(8, 2).dropout(0.1));
  expect_a_region_changes_no_bit(*attention, torch::randn({5, 3, 8}), [&](const torch::Tensor& x) {
    return std::get<0>(attention->forward(x, x, x));
  });
}

TEST(CheckpointTest, FrozenLayersAndInputsWithoutGradientsAreFine) {
  torch::nn::Sequential module(torch::nn::Embedding(10, 8), torch::nn::Linear(8, 8),
                               torch::nn::Tanh(), torch::nn::Linear(8, 2));
  module[1]->as<torch::nn::Linear>()->weight.set_requires_grad(false);
  expect_a_region_changes_no_bit(*module, torch::arange(6),
                                 [&](const torch::Tensor& x) { return module->forward(x); });
}

TEST(CheckpointTest, RegionsNestAndTakeAnyArgumentsAndResults) {
  torch::nn::Linear inner(4, 4), outer(4, 4);
  const auto x = torch::randn({3, 4}).requires_grad_();
  const auto mask = torch::rand({3, 4}) > 0.5;
  const auto run = [&](bool regions) {
    x.mutable_grad() = torch::Tensor();
    inner->zero_grad(true);
    outer->zero_grad(true);
    const auto core = [&](const torch::Tensor& t) { return torch::gelu(inner(t)).exp(); };
    const auto function = [&](std::vector<torch::Tensor> in, std::optional<torch::Tensor> keep,
                              double scale) {
      const auto y = outer(in[0]).tanh() * scale;
      const auto z = regions ? checkpoint({.name = "inner"}, core, y) : core(y);
      return std::make_tuple(z * *keep, y.sin(), std::string("a value"));
    };
    const std::vector<torch::Tensor> in = {x};
    const auto [a, b, text] =
        regions ? checkpoint({.name = "outer"}, function, in, std::optional(mask), 0.5)
                : function(in, mask, 0.5);
    EXPECT_EQ(text, "a value");
    (a.sum() + b.prod()).backward();
    return std::vector{x.grad().clone(), inner->weight.grad().clone(),
                       outer->weight.grad().clone()};
  };
  const auto plain = run(false), nested = run(true);
  for (size_t index = 0; index < plain.size(); ++index) {
    EXPECT_TRUE(torch::equal(plain[index], nested[index]));
  }
}

TEST(CheckpointTest, InPlaceOperatorsInsideAndOnTheInputAreRepeatedFromWhatTheyFound) {
  torch::nn::Linear linear(4, 4);
  expect_a_region_changes_no_bit(*linear, torch::randn({3, 4}), [&](const torch::Tensor& x) {
    auto y = linear(x);
    y.mul_(2).add_(x);
    return y.sigmoid_() * 3;
  });
  // The region changes its own input.
  const auto run = [&](bool region) {
    const auto x = torch::ones({3, 4}).requires_grad_();
    auto middle = x * 3;
    const auto function = [&](torch::Tensor m) { return linear(m.add_(1)).tanh().square(); };
    const auto y = region ? checkpoint(function, middle) : function(middle);
    y.sum().backward();
    EXPECT_TRUE(torch::equal(middle.detach(), torch::full({3, 4}, 4.0)));
    return x.grad().clone();
  };
  EXPECT_TRUE(torch::equal(run(false), run(true)));
}

TEST(CheckpointTest, RetainGraphAndCreateGraphRepeatTheRegionAgain) {
  torch::nn::Linear linear(4, 4);
  const auto x = torch::randn({3, 4}).requires_grad_();
  const auto function = [&](const torch::Tensor& t) { return linear(t).tanh().pow(3); };
  const auto plain = function(x).sum(), region = checkpoint(function, x).sum();
  for (int time = 0; time < 2; ++time) {
    const auto expected = torch::autograd::grad({plain}, {x}, {}, /*retain_graph=*/true)[0];
    EXPECT_TRUE(
        torch::equal(expected, torch::autograd::grad({region}, {x}, {}, /*retain_graph=*/true)[0]));
  }
  const auto second = [&](const torch::Tensor& loss) {
    const auto first = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.square().sum()}, {x})[0];
  };
  EXPECT_TRUE(torch::equal(second(plain), second(region)));
}

TEST(CheckpointTest, ARepetitionEndsWithTheLastTensorThatIsNeeded) {
  const auto x = torch::randn({3, 3}).requires_grad_();
  int ends = 0;
  const auto run = [&](bool early_stop) {
    checkpoint(
        {.early_stop = early_stop},
        [&](const torch::Tensor& t) {
          const auto y = t.exp() * 2 + 1;
          ++ends;
          return y;
        },
        x)
        .sum()
        .backward();
  };
  run(true);
  EXPECT_EQ(ends, 1);
  run(false);
  EXPECT_EQ(ends, 3);
}

TEST(CheckpointTest, OnlyTheInputsAreKeptAndRecomputedBytesGoAsTheyAreUsed) {
  memory::Ledger& ledger = *memory::Ledger::current();
  const auto held = [&] { return ledger.now().activations(); };
  const auto x = torch::randn({256, 256}).requires_grad_();
  const int64_t bytes = 256 * 256 * 4;
  const int64_t base = held();
  const auto chain = [](torch::Tensor t) {
    for (int i = 0; i < 8; ++i) t = t.sin();
    return t;
  };
  auto y = checkpoint(chain, x * 1);
  EXPECT_LE(held() - base, 2 * bytes + 100'000);  // the input and the output
  ledger.reset_peak();
  y.sum().backward({}, /*retain_graph=*/true);
  EXPECT_GE(ledger.at_peak()[memory::Kind::kRecompute], 6 * bytes);
  EXPECT_EQ(ledger.now()[memory::Kind::kRecompute], 0);
  y.reset();
  EXPECT_LE(held() - base, bytes + 100'000);  // x.grad()
}

TEST(CheckpointTest, FlopsOfTheRepetitionAreThoseOfTheForwardLessWhatWasNotNeeded) {
  torch::nn::Sequential module(torch::nn::Linear(16, 32), torch::nn::Tanh(),
                               torch::nn::Linear(32, 16));
  const auto before = recompute_statistics();
  checkpoint([&](const torch::Tensor& x) { return module->forward(x); }, torch::randn({4, 16}))
      .sum()
      .backward();
  const auto after = recompute_statistics();
  const double first = 2.0 * 4 * 16 * 32;
  EXPECT_EQ(after.forward_flops - before.forward_flops, 2 * first);
  EXPECT_EQ(after.recomputed_flops - before.recomputed_flops, first);
}

TEST(CheckpointTest, AnInputChangedInPlaceAfterwardsIsRefusedByName) {
  const auto x = torch::ones({3}).requires_grad_();
  auto middle = x * 2;
  const auto y = checkpoint(
      {.name = "layer 4"}, [](const torch::Tensor& t) { return t.exp(); }, middle);
  middle.detach().add_(1);
  const std::string error = testing::error_of([&] { y.sum().backward(); });
  EXPECT_THAT(error,
              ::testing::HasSubstr("region \"layer 4\": arguments[0] of sizes [3] was changed "
                                   "in place after the region"));
}

TEST(CheckpointTest, BackwardOverAGraphFromBeforeTheOptimizersStepIsRefused) {
  torch::manual_seed(1);
  torch::nn::Sequential module(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 4));
  torch::optim::AdamW optimizer(module->parameters(), 0.1);
  const auto x = torch::randn({3, 4}).requires_grad_();
  const auto forward = [&](const torch::Tensor& t) { return module->forward(t); };
  const auto within = [&](const torch::Tensor& t) {
    return checkpoint({.name = "inner"}, forward, t.sin()).cos();
  };
  for (const bool nested : {false, true}) {
    const auto run = [&](const torch::Tensor& t) {
      return nested ? checkpoint({.name = "layer 4"}, within, t)
                    : checkpoint({.name = "layer 4"}, forward, t);
    };
    const auto before = run(x).sum();
    run(x).sum().backward();
    optimizer.step();
    EXPECT_THAT(testing::error_of([&] { before.backward(); }),
                ::testing::AllOf(::testing::HasSubstr("region \"layer 4\": a tensor of sizes ["),
                                 ::testing::HasSubstr("that its function captured, such as a "
                                                      "parameter, was changed in place after the "
                                                      "region (version "),
                                 ::testing::HasSubstr("run backward() before optimizer.step()")));
    run(x).sum().backward();  // nothing stays behind
  }
  // Also where the region's own tensors come first: only the second layer has changed.
  const auto before = checkpoint({.name = "block"}, forward, x).sum();
  {
    const torch::NoGradGuard no_grad;
    module[2]->as<torch::nn::Linear>()->weight.add_(1);
  }
  EXPECT_THAT(testing::error_of([&] { before.backward(); }),
              ::testing::HasSubstr("region \"block\": a tensor of sizes [8, 4] that its function"));
}

TEST(CheckpointTest, WhatTheFunctionItselfWritesOrDoesNotReadAgainMayChange) {
  torch::nn::Linear linear(4, 4);
  torch::nn::BatchNorm1d norm(4);
  const auto last = torch::ones({4});
  const auto x = torch::randn({6, 4}).requires_grad_();
  const auto function = [&](const torch::Tensor& t) { return norm(linear(t)).tanh() + last; };
  const auto plain_of = [&](bool region) {
    norm->reset_running_stats();
    linear->zero_grad(true);
    const auto run = [&] { return region ? checkpoint(function, x) : function(x); };
    // Two forwards before the backwards, so the first one's statistics are not those of now.
    const auto first = run().sum(), second = run().square().sum();
    last.add_(1);  // nothing that is saved depends on it
    second.backward();
    first.backward();
    return std::vector{linear->weight.grad().clone(), norm->running_mean.clone(),
                       norm->num_batches_tracked.clone()};
  };
  const auto plain = plain_of(false);
  last.fill_(1);
  const auto regions = plain_of(true);
  for (size_t index = 0; index < plain.size(); ++index) {
    EXPECT_TRUE(torch::equal(plain[index], regions[index])) << index;
  }
}

TEST(CheckpointTest, StatisticsThatARegionWithinARegionWritesAreUpdatedOnce) {
  torch::nn::Linear linear(4, 4);
  torch::nn::BatchNorm1d norm(4);
  const auto x = torch::randn({6, 4});
  torch::nn::Sequential module(linear, norm);
  expect_a_region_changes_no_bit(*module, x, [&](const torch::Tensor& t) {
    const auto y = checkpoint(
        {.name = "inner"}, [&](const torch::Tensor& s) { return norm(linear(s)).tanh(); }, t.sin());
    return y.exp().sin();
  });
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 1);
}

TEST(CheckpointTest, ARepetitionThatDiffersIsRefusedWithTheFirstTensorThatDiffers) {
  const auto x = torch::ones({3}).requires_grad_();
  int64_t length = 3;
  double factor = 2;
  const auto run = [&](RecomputeCheck check) {
    length = 3;
    factor = 2;
    const auto y = checkpoint(
        {.name = "block 1", .early_stop = false, .check = check},
        [&](const torch::Tensor& t) { return t.narrow(0, 0, length).mul(factor).sin().exp(); }, x);
    return y.sum();
  };
  auto loss = run(RecomputeCheck::kGeometry);
  length = 2;
  EXPECT_THAT(testing::error_of([&] { loss.backward(); }),
              ::testing::HasSubstr("saved tensor 0 of 2 differs in the repetition: expected Float "
                                   "[3] on cpu, got Float [2] on cpu"));
  loss = run(RecomputeCheck::kValues);
  factor = 3;
  EXPECT_THAT(testing::error_of([&] { loss.backward(); }),
              ::testing::HasSubstr("region \"block 1\": saved tensor 0 of 2, Float [3] on cpu, has "
                                   "other values in the repetition"));
}

TEST(CheckpointTest, AnExceptionInTheRepetitionHasTheRegionsNameAndLeavesNothingBehind) {
  const auto x = torch::ones({3}).requires_grad_();
  bool fails = false;
  const auto y = checkpoint(
      {.name = "block 2"},
      [&](const torch::Tensor& t) {
        const auto z = torch::dropout(t, 0.5, true);
        if (fails) throw std::runtime_error("no more");
        return z.exp();
      },
      x);
  fails = true;
  torch::manual_seed(5);
  const auto expected = torch::rand({4});
  torch::manual_seed(5);
  const std::string error = testing::error_of([&] { y.sum().backward({}, true); });
  EXPECT_THAT(error, ::testing::HasSubstr("repeating region \"block 2\" in backward: no more"));
  EXPECT_EQ(SavedTensorScope::current(), nullptr);
  EXPECT_TRUE(torch::equal(torch::rand({4}), expected));
  fails = false;
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(CheckpointTest, ARegionWithoutGradientsWarnsOnceAndOneUnderNoGradIsPlain) {
  const auto warnings_of = [](const char* name) {
    ::testing::internal::CaptureStderr();
    checkpoint(
        {.name = name}, [](const torch::Tensor& t) { return t.exp(); }, torch::ones({2}));
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(warnings_of("frozen"),
              ::testing::HasSubstr("region \"frozen\": no result requires a gradient"));
  EXPECT_EQ(warnings_of("frozen"), "");
  EXPECT_THAT(warnings_of("frozen, too"), ::testing::HasSubstr("\"frozen, too\""));
  ::testing::internal::CaptureStderr();
  const torch::NoGradGuard no_grad;
  checkpoint([](const torch::Tensor& t) { return t.exp(); }, torch::ones({2}));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(CheckpointTest, AutocastIsAsItWasInTheFirstRun) {
  torch::nn::Linear linear(8, 8);
  const auto run = [&](bool region) {
    linear->zero_grad(true);
    const auto x = torch::ones({2, 8}).requires_grad_();
    torch::Tensor y;
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const auto function = [&](const torch::Tensor& t) { return linear(t).exp(); };
    y = region ? checkpoint(function, x) : function(x);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    EXPECT_EQ(linear(x).scalar_type(), at::kFloat);
    y.sum().backward();
    return linear->weight.grad().clone();
  };
  EXPECT_TRUE(torch::equal(run(false), run(true)));
}

// Autocast of the host, while it lives.
class Autocast {
 public:
  explicit Autocast(std::optional<at::ScalarType> dtype)
      : enabled_(at::autocast::is_autocast_enabled(at::kCPU)),
        dtype_(at::autocast::get_autocast_dtype(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, dtype.has_value());
    if (dtype) at::autocast::set_autocast_dtype(at::kCPU, *dtype);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, enabled_);
    at::autocast::set_autocast_dtype(at::kCPU, dtype_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const bool enabled_;
  const at::ScalarType dtype_;
};

// What runs the forward in bf16, and backward under `of_backward`. A forward before backward leaves
// casts of the weights to its dtype in autocast's cache.
Gradients gradients_across_autocast(torch::nn::SequentialImpl& module, const torch::Tensor& input,
                                    std::optional<at::ScalarType> of_backward,
                                    const Forward& forward) {
  for (auto& parameter : module.parameters()) parameter.mutable_grad() = torch::Tensor();
  const auto x = input.clone().requires_grad_();
  torch::Tensor loss, output;
  {
    const Autocast bf16(at::kBFloat16);
    output = forward(x);
    loss = output.to(torch::kFloat).square().sum();
  }
  {
    const Autocast other(of_backward);
    const auto probe = module.forward(x);
    EXPECT_EQ(probe.scalar_type(), of_backward.value_or(at::kFloat));
    loss.backward();
    EXPECT_EQ(at::autocast::is_autocast_enabled(at::kCPU), of_backward.has_value());
    if (of_backward) {
      EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), *of_backward);
    }
    EXPECT_EQ(module.forward(x).scalar_type(), probe.scalar_type());
  }
  Gradients gradients{output.detach().clone(), {x.grad().clone()}};
  for (auto& parameter : module.parameters()) gradients.of.push_back(parameter.grad().clone());
  return gradients;
}

TEST(CheckpointTest, ARepetitionHasTheAutocastOfItsForwardWhateverBackwardRunsUnder) {
  torch::manual_seed(3);
  torch::nn::Sequential module(torch::nn::Linear(16, 32), torch::nn::Tanh(), torch::nn::Sigmoid(),
                               torch::nn::Linear(32, 32), torch::nn::Sigmoid(),
                               torch::nn::Linear(32, 4));
  const auto x = torch::randn({8, 16});
  const Forward plain = [&](const torch::Tensor& t) { return module->forward(t); };
  const std::vector<std::optional<at::ScalarType>> of_backwards = {std::nullopt, at::kHalf,
                                                                   at::kBFloat16};
  for (const auto& of_backward : of_backwards) {
    SCOPED_TRACE(of_backward ? c10::toString(*of_backward) : "no autocast");
    const auto expected = gradients_across_autocast(*module, x, of_backward, plain);
    expect_same_bits(
        expected, gradients_across_autocast(*module, x, of_backward, [&](const torch::Tensor& t) {
          return checkpoint({.check = RecomputeCheck::kValues}, plain, t);
        }));
    for (const std::optional<int64_t> budget :
         {std::optional<int64_t>(), std::optional<int64_t>(1)}) {
      const auto replays = recompute_statistics().replays;
      RecomputeOptions options;
      options.least_bytes = 1;
      options.budget_bytes = budget;
      Recompute recompute(options);
      expect_same_bits(
          expected, gradients_across_autocast(*module, x, of_backward, [&](const torch::Tensor& t) {
            const ActivationScope scope(recompute);
            return plain(t);
          }));
      EXPECT_GT(recompute_statistics().replays, replays);
    }
  }
}

class GeluBlockImpl : public torch::nn::Module {
 public:
  explicit GeluBlockImpl(int64_t width)
      : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + torch::gelu(linear(x)); }
  torch::nn::Linear linear;
};
TORCH_MODULE(GeluBlock);

TEST(CheckpointedTest, BlocksListsAndSequentialsHaveThePlainNamesAndBits) {
  torch::manual_seed(0);
  torch::nn::ModuleList plain, checkpointed;
  torch::nn::Sequential sequential;
  for (int i = 0; i < 5; ++i) {
    plain->push_back(GeluBlock(6));
    checkpointed->push_back(std::make_shared<Checkpointed<GeluBlockImpl>>(6));
    sequential->push_back(GeluBlock(6));
    const torch::NoGradGuard no_grad;
    const auto from = plain->ptr(i)->named_parameters();
    for (const auto& other : {checkpointed->ptr(i), sequential->ptr(i)}) {
      for (auto& parameter : other->named_parameters()) {
        parameter.value().copy_(from[parameter.key()]);
      }
    }
  }
  EXPECT_EQ(plain->named_parameters().keys(), checkpointed->named_parameters().keys());
  const auto x = torch::randn({3, 6});
  const auto step = [&](torch::Tensor t, int64_t i) {
    return plain->at<GeluBlockImpl>(static_cast<size_t>(i)).forward(t);
  };
  const auto expected = gradients_of(*plain, x, [&](const torch::Tensor& t) {
    return checkpoint_each(5, EveryBlocks::none(), t, step);
  });
  for (const auto every :
       {EveryBlocks::each(), EveryBlocks::square_root(), EveryBlocks::every(3)}) {
    expect_same_bits(expected, gradients_of(*plain, x, [&](const torch::Tensor& t) {
                       return checkpoint_each(5, every, t, step);
                     }));
  }
  expect_same_bits(
      expected, gradients_of(*checkpointed, x, [&](torch::Tensor t) {
        for (const auto& block : *checkpointed) {
          t = std::dynamic_pointer_cast<Checkpointed<GeluBlockImpl>>(block)->forward(t);
        }
        return t;
      }));
  expect_same_bits(expected, gradients_of(*sequential, x, [&](const torch::Tensor& t) {
                     return checkpoint_sequential(sequential, 2, t);
                   }));
  EXPECT_THAT(testing::error_of([&] { checkpoint_sequential(sequential, 6, x); }),
              ::testing::HasSubstr("expected 1 to 5 segments"));
}

}  // namespace
}  // namespace zeropage::checkpointing::checkpoint_test

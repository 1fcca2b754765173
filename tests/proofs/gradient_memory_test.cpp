// Gradients take memory from the first one of a backward until they are zeroed, as in a loop in plain LibTorch, and
// p.grad() is what it is there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "examples/byte_gpt/gpt.h"
#include "memory/meta_memory.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/square_layers.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/gathered_parameters.h"
#include "zeropage/gradient_norm.h"
#include "zeropage/plan.h"
#include "zeropage/testing.h"
#include "zeropage/zeropage.h"

namespace zeropage::gradient_memory_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using memory::Ledger;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using torch::Tensor;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr int kLayers = 4;
constexpr int64_t kWidth = 64;
constexpr int64_t kPageBytes = kWidth * kWidth * 4;

using Model = DistributedDataParallel<torch::nn::Sequential>;
using Sgd = Optimizer<SGD>;

// Each weight is a page.
Options options_of(int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = kPageBytes;
  return options;
}

int64_t gradient_bytes() {
  return Ledger::current()->now()[Kind::kGradient];
}

int64_t planned_gradient_bytes(const Model& model) {
  return sharded_parameters_of(model).pages->plan().gradient_bytes();
}

Tensor inputs_of(const comm::World& world) {
  return torch::full({2, kWidth}, 0.01 * (1 + world.rank()));
}

void backward(Model& model, comm::World& world) {
  model(inputs_of(world)).square().sum().backward();
}

class GradientMemoryTest : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  int ranks() const { return std::get<0>(GetParam()); }
  int stage() const { return std::get<1>(GetParam()); }
  // Bytes of a page's reduced gradient that a rank keeps.
  int64_t kept_page_bytes() const { return stage() >= 2 ? kPageBytes / ranks() : kPageBytes; }

  void train(
      const std::function<void(Model& model, Sgd& optimizer, comm::World& world)>& run) const {
    run_ranks(ranks(), [&](comm::World& world) {
      Model model(square_layers(kLayers, kWidth), world, options_of(stage()));
      Sgd optimizer(model, SGDOptions(1e-3));
      run(model, optimizer, world);
    });
  }
};

TEST_P(GradientMemoryTest, IsThereFromBackwardUntilGradientsAreZeroedInAnyForm) {
  using Zero = std::function<void(Model&, Sgd&)>;
  const std::vector<std::pair<const char*, Zero>> ways = {
      {"the wrapper", [](Model& model, Sgd&) { model.zero_grad(); }},
      {"the module", [](Model& model, Sgd&) { model.module()->zero_grad(); }},
      {"the optimizer", [](Model&, Sgd& optimizer) { optimizer.zero_grad(); }},
      {"a reference to LibTorch's class",
       [](Model&, Sgd& optimizer) {
         static_cast<torch::optim::Optimizer&>(optimizer).zero_grad();
       }},
      {"by hand",
       [](Model& model, Sgd&) {
         for (const Tensor& parameter : model.parameters()) parameter.mutable_grad().reset();
       }},
      {"another tensor", [](Model& model, Sgd&) {
         for (const Tensor& parameter : model.parameters()) {
           parameter.mutable_grad() = torch::zeros({kWidth, kWidth});
         }
         model.zero_grad();
       }}};
  train([&](Model& model, Sgd& optimizer, comm::World& world) {
    EXPECT_EQ(gradient_bytes(), 0) << "before the first backward";
    for (const auto& [name, zero] : ways) {
      SCOPED_TRACE(name);
      backward(model, world);
      EXPECT_EQ(gradient_bytes(), planned_gradient_bytes(model));
      optimizer.step();
      EXPECT_EQ(gradient_bytes(), planned_gradient_bytes(model))
          << "p.grad() is there after step()";
      zero(model, optimizer);
      EXPECT_EQ(gradient_bytes(), 0);
    }
  });
}

TEST_P(GradientMemoryTest, ComesPageByPageAsBackwardGoesThroughTheModel) {
  train([&](Model& model, Sgd& optimizer, comm::World& world) {
    for (int step = 0; step < 2; ++step) {
      std::vector<int64_t> in_forward, in_backward;
      Tensor x = inputs_of(world);
      for (auto& layer : *model.module()) {
        x = layer.forward(x);
        in_forward.push_back(gradient_bytes());
        // Before the gradient of this layer's weight.
        x.register_hook([&](const Tensor&) { in_backward.push_back(gradient_bytes()); });
      }
      x.square().sum().backward();
      for (int layer = 0; layer < kLayers; ++layer) {
        EXPECT_EQ(in_forward[layer], 0);
        EXPECT_LE(in_backward[layer], layer * kept_page_bytes());
      }
      // At stages 2 and 3 the last page's reduction may not have ended.
      EXPECT_GE(in_backward.back(), (kLayers - 2) * kept_page_bytes());
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

TEST_P(GradientMemoryTest, IsGivenBackByAnAccumulatorsStepAndByAbandon) {
  for (const ReduceMicroSteps reduce : {ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
    train([&](Model& model, Sgd& optimizer, comm::World& world) {
      Accumulator accumulator(model, {.micro_steps = 2, .reduce = reduce});
      const auto micro_batch = [&] {
        accumulator.backward(model(inputs_of(world)).square().sum());
        EXPECT_GT(gradient_bytes() + Ledger::current()->now()[Kind::kBucket], 0);
      };
      for (int step = 0; step < 2; ++step) {
        micro_batch();
        micro_batch();
        accumulator.step(optimizer);
        EXPECT_EQ(gradient_bytes(), 0);
      }
      micro_batch();
      accumulator.abandon();
      EXPECT_EQ(gradient_bytes(), 0);
      EXPECT_EQ(Ledger::current()->now()[Kind::kBucket], 0);
    });
  }
}

TEST_P(GradientMemoryTest, OfATreeOverMicroStepsIsGivenBackByAbandonToo) {
  run_ranks(ranks(), [&](comm::World& world) {
    Options options = options_of(stage());
    options.world_invariant = true;
    Model model(square_layers(kLayers, kWidth), world, options);
    Accumulator accumulator(model, {.micro_steps = 8});
    for (int micro_step = 0; micro_step < 5; ++micro_step) {
      accumulator.backward(model(inputs_of(world)).square().sum());
    }
    EXPECT_GT(gradient_bytes(), planned_gradient_bytes(model));
    accumulator.abandon();
    EXPECT_EQ(gradient_bytes(), 0);
  });
}

TEST_P(GradientMemoryTest, StaysWhereGradientsAreZeroedInPlace) {
  train([&](Model& model, Sgd& optimizer, comm::World& world) {
    backward(model, world);
    optimizer.step();
    optimizer.zero_grad(/*set_to_none=*/false);
    // Filling with zeros gathers.
    EXPECT_GE(gradient_bytes(), planned_gradient_bytes(model));
    for (const Tensor& parameter : model.parameters()) {
      EXPECT_EQ(parameter.grad().abs().sum().item<double>(), 0);
    }
  });
}

TEST_P(GradientMemoryTest, OfAPageStaysAsLongAsOneOfItsGradientsDoes) {
  run_ranks(ranks(), [&](comm::World& world) {
    Options options = options_of(stage());
    options.page_bytes = 2 * kPageBytes;
    // A page of a weight and a bias.
    Model model(torch::nn::Sequential(torch::nn::Linear(kWidth, kWidth)), world, options);
    ASSERT_EQ(sharded_parameters_of(model).pages->layouts().size(), 1U);
    backward(model, world);
    const int64_t all = planned_gradient_bytes(model);
    model.parameters()[0].mutable_grad().reset();
    EXPECT_EQ(gradient_bytes(), all);
    model.parameters()[1].mutable_grad().reset();
    EXPECT_EQ(gradient_bytes(), 0);
  });
}

TEST_P(GradientMemoryTest, OfBackwardsUnderNoSyncIsThereOnceAndGoesWithZeroGrad) {
  train([&](Model& model, Sgd& optimizer, comm::World& world) {
    const auto bytes = [] { return gradient_bytes() + Ledger::current()->now()[Kind::kBucket]; };
    for (int step = 0; step < 2; ++step) {
      {
        const auto guard = model.no_sync();
        backward(model, world);
        backward(model, world);
      }
      EXPECT_EQ(bytes(), kLayers * kPageBytes);
      model.zero_grad();
      EXPECT_EQ(bytes(), 0);
      backward(model, world);
      optimizer.step();
      model.zero_grad();
      EXPECT_EQ(bytes(), 0);
    }
  });
}

// clip_grad_norm_ of LibTorch gathers what it reads, and so does a look at p.grad() after step().
TEST_P(GradientMemoryTest, IsNotHeldByWhoHasReadIt) {
  train([&](Model& model, Sgd& optimizer, comm::World& world) {
    backward(model, world);
    torch::nn::utils::clip_grad_norm_(model.parameters(), 0.1);
    optimizer.step();
    EXPECT_EQ(gradient_bytes(), planned_gradient_bytes(model));
    for (const Tensor& parameter : model.parameters()) parameter.grad().norm();
    optimizer.zero_grad();
    const Tensor outputs = model(inputs_of(world));
    EXPECT_EQ(gradient_bytes(), 0) << "in the next forward";
  });
}

TEST_P(GradientMemoryTest, IsMadeAnewForGradientsThatAreSetByHand) {
  train([&](Model& model, Sgd& optimizer, comm::World& world) {
    backward(model, world);
    model.zero_grad();
    std::vector<Tensor> before;
    visit_parameters(model,
                     [&](const std::string&, const Tensor& v) { before.push_back(v.clone()); });
    model.parameters()[1].mutable_grad() = torch::ones({kWidth, kWidth});
    optimizer.step();
    size_t index = 0;
    visit_parameters(model, [&](const std::string&, const Tensor& values) {
      const Tensor expected = index == 1 ? before[1] - 1e-3 : before[index];
      EXPECT_TRUE(torch::allclose(values, expected, 0, 1e-7)) << "parameter " << index;
      ++index;
    });
    model.zero_grad();
    EXPECT_EQ(gradient_bytes(), 0);
  });
}

INSTANTIATE_TEST_SUITE_P(RanksStages, GradientMemoryTest,
                         ::testing::Combine(::testing::Values(1, 2),
                                            ::testing::Values(0, 1, 2, 3)));

class KeptGradientsTest : public ::testing::TestWithParam<int> {};

TEST_P(KeptGradientsTest, StayWhatTheyAreBeyondZeroGradAndTheNextBackward) {
  run_ranks(GetParam(), [&](comm::World& world) {
    Model model(square_layers(kLayers, kWidth), world, options_of(0));
    backward(model, world);
    const Tensor kept = model.parameters()[0].grad();
    const Tensor view = model.parameters()[1].grad().view({-1});
    const Tensor kept_before = kept.clone(), view_before = view.clone();
    model.zero_grad();
    EXPECT_EQ(gradient_bytes(), 2 * kPageBytes);
    model(3 * inputs_of(world)).square().sum().backward();
    EXPECT_TRUE(torch::equal(kept, kept_before));
    EXPECT_TRUE(torch::equal(view, view_before));
    EXPECT_FALSE(torch::equal(model.parameters()[0].grad(), kept_before));
  });
}

TEST_P(KeptGradientsTest, SeeWhatASecondBackwardAddsToThemAsInPlainLibTorch) {
  run_ranks(GetParam(), [&](comm::World& world) {
    Model model(square_layers(kLayers, kWidth), world, options_of(0));
    backward(model, world);
    const Tensor kept = model.parameters()[0].grad();
    const Tensor once = kept.clone();
    backward(model, world);
    EXPECT_TRUE(torch::allclose(kept, 2 * once));
    EXPECT_TRUE(kept.is_same(model.parameters()[0].grad()));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, KeptGradientsTest, ::testing::Values(1, 2));

class ZeroedGradientsTest : public ::testing::TestWithParam<int> {};

// Others keep the tensor that they are views of.
Tensor view_that_keeps_nothing(const Tensor& gradient) {
  const at::AutoDispatchBelowADInplaceOrView untracked;
  return gradient.view({kWidth, kWidth});
}

TEST_P(ZeroedGradientsTest, AreThereForAViewOfThemUntilTheNextBackward) {
  run_ranks(2, [&](comm::World& world) {
    Model model(square_layers(kLayers, kWidth), world, options_of(GetParam()));
    backward(model, world);
    const Tensor view = model.parameters()[0].grad().view({-1});
    const Tensor before = view.clone();
    model.zero_grad();
    EXPECT_TRUE(torch::equal(view, before));
  });
}

TEST_P(ZeroedGradientsTest, AreRefusedInWordsToWhoReadsAViewThatKeepsNothing) {
  run_ranks(2, [&](comm::World& world) {
    Model model(square_layers(kLayers, kWidth), world, options_of(GetParam()));
    backward(model, world);
    const Tensor view = view_that_keeps_nothing(model.parameters()[0].grad());
    model.zero_grad();
    EXPECT_EQ(gradient_bytes(), 0);
    EXPECT_THAT(error_of([&] { view.sum(); }), HasSubstr("read gradients before zero_grad()"));
  });
}

TEST_P(ZeroedGradientsTest, AreRefusedInWordsAsGradientsOfAStep) {
  run_ranks(2, [&](comm::World& world) {
    Model model(square_layers(kLayers, kWidth), world, options_of(GetParam()));
    Sgd optimizer(model, SGDOptions(1e-3));
    backward(model, world);
    const Tensor parameter = model.parameters()[0];
    const Tensor view = view_that_keeps_nothing(parameter.grad());
    model.zero_grad();
    parameter.mutable_grad() = view;
    EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr("keep a clone() of the gradient"));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, ZeroedGradientsTest, ::testing::Values(1, 2, 3));

// A step as a careful user writes it in plain LibTorch: fp32 masters, whose gradients are there in the step alone.
class PlainLoop {
 public:
  PlainLoop(const train_gpt::Gpt& gpt, bool is_low) : gpt_(gpt) {
    for (const Tensor& parameter : gpt_->parameters()) {
      masters_.push_back(is_low ? parameter.detach().clone() : parameter.detach());
      for (int state = 0; state < 2; ++state) states_.push_back(torch::zeros_like(masters_.back()));
    }
    if (is_low) gpt_->to(torch::kBFloat16);
  }

  void step(const Tensor& tokens) {
    gpt_->zero_grad();
    train_gpt::next_token_loss(gpt_(tokens), tokens).backward();
    const torch::NoGradGuard no_grad;
    size_t index = 0;
    for (const Tensor& parameter : gpt_->parameters()) {
      masters_[index].sub_(parameter.grad(), 1e-3);
      if (!parameter.is_alias_of(masters_[index])) parameter.copy_(masters_[index]);
      ++index;
    }
  }

 private:
  train_gpt::Gpt gpt_;
  std::vector<Tensor> masters_, states_;
};

constexpr int64_t kBatch = 8;

Tensor tokens_of(const train_gpt::GptConfig& config, torch::Device device) {
  return torch::zeros({kBatch, config.sequence},
                      torch::TensorOptions().dtype(torch::kInt64).device(device));
}

// The peak of a model that is constructed without values.
int64_t simulated_plain_peak(const train_gpt::GptConfig& config) {
  // A simulated world knows operators without values, and their bytes.
  const comm::World world = comm::World::simulated({.topology = comm::Topology::even(1, 1)});
  const auto ledger = std::make_shared<Ledger>("a plain loop");
  const memory::LedgerScope scope(ledger);
  // Without the tape, which keeps the values that it would be replayed to.
  const train_gpt::Gpt gpt =
      DeferredModule<train_gpt::Gpt>([&] { return train_gpt::Gpt(config, 0); }).module();
  PlainLoop loop(gpt, /*is_low=*/true);
  const Tensor tokens = tokens_of(config, torch::kMeta);
  loop.step(tokens);
  ledger->reset_peak();
  loop.step(tokens);
  return ledger->at_peak(torch::kMeta).total();
}

// The peak of a rank with that batch, without what collectives keep.
int64_t measured_peak(const train_gpt::GptConfig& config, int stage) {
  int64_t peak = 0;
  run_ranks(2, [&](comm::World& world) {
    Options options = options_of(stage);
    DistributedDataParallel<train_gpt::Gpt> model(train_gpt::Gpt(config, 0), world, options);
    Optimizer<torch::optim::AdamW> optimizer(model);
    const Tensor tokens = tokens_of(config, torch::kCPU);
    Ledger& ledger = *Ledger::current();
    for (int step = 0; step < 2; ++step) {
      ledger.reset_peak();
      optimizer.zero_grad();
      train_gpt::next_token_loss(model(tokens), tokens).backward();
      optimizer.step();
    }
    const memory::Breakdown at_peak = ledger.at_peak();
    if (world.rank() == 0) peak = at_peak.total() - at_peak[Kind::kStaging];
  });
  return peak;
}

int64_t measured_plain_peak(const train_gpt::GptConfig& config) {
  const auto ledger = std::make_shared<Ledger>("a plain loop");
  const memory::LedgerScope scope(ledger);
  PlainLoop loop(train_gpt::Gpt(config, 0), /*is_low=*/false);
  const Tensor tokens = tokens_of(config, torch::kCPU);
  for (int step = 0; step < 2; ++step) {
    ledger->reset_peak();
    loop.step(tokens);
  }
  return ledger->at_peak().total();
}

// But for padding, which is some 0.1 % here.
TEST(GradientPeakTest, OfTwoRanksOnTheHostIsThatOfAPlainLoop) {
  const train_gpt::GptConfig config{.d_model = 64, .layers = 4, .heads = 4, .sequence = 64};
  const auto plain = static_cast<double>(measured_plain_peak(config));
  EXPECT_NEAR(static_cast<double>(measured_peak(config, 0)), plain, 0.003 * plain);
  EXPECT_LE(static_cast<double>(measured_peak(config, 1)), plain);
  EXPECT_LE(static_cast<double>(measured_peak(config, 2)), plain);
  EXPECT_LE(static_cast<double>(measured_peak(config, 3)), plain);
}

// GPT of 1.2 billion parameters.
TEST(GradientPeakTest, OfASimulatedDeviceIsAtMostThatOfAPlainLoop) {
  const train_gpt::GptConfig config{.d_model = 2048, .layers = 24, .heads = 16, .sequence = 1024};
  const int64_t plain = simulated_plain_peak(config);
  PlanOptions options;
  options.training.compute_dtype = options.training.accumulate_dtype = torch::kBFloat16;
  options.stages = {0, 3};
  options.tiers = {memory::Tier::kDevice};
  options.policies = {CheckpointPolicy::kNone};
  const ModelToPlan<train_gpt::Gpt> model{
      .construct = [&] { return train_gpt::Gpt(config, 0); },
      .loss =
          [&](DistributedDataParallel<train_gpt::Gpt>& wrapped) {
            const Tensor tokens = tokens_of(config, torch::kMeta);
            return train_gpt::next_token_loss(wrapped(tokens), tokens);
          },
      .checkpoint_blocks = {},
      .optimizer = {}};
  const Plan plan = zeropage::plan(model, {.ranks = 1}, options);
  ASSERT_EQ(plan.forecasts.size(), 2U);
  for (const Forecast& forecast : plan.forecasts) {
    const memory::Breakdown& peak = forecast.at_peak[memory::Tier::kDevice];
    EXPECT_LE(peak.total(), plain) << to_string(forecast.setting) << ": " << memory::to_text(peak);
    EXPECT_GT(peak.total(), plain - plain / 50) << "it is not the same model";
  }
}

}  // namespace
}  // namespace zeropage::gradient_memory_test

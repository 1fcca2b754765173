// With a step in backward a gradient is freed as soon as its page is updated: the bytes of a few pages, the bits and
// the norms of a step in step(), and refusals in words where somebody asks for what is gone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/square_layers.h"
#include "zero/setup/sharded_model.h"
#include "zero/tiers/transient_storage.h"
#include "zeropage/gradient_norm.h"
#include "zeropage/plan.h"
#include "zeropage/zeropage.h"

namespace zeropage::passing_gradients_test {
namespace {

using memory::Kind;
using memory::Ledger;
using memory::Tier;
using testing::error_of;
using ::testing::HasSubstr;
using testing::run_ranks;

constexpr int64_t kWidth = 64;
constexpr int64_t kLayers = 12;
constexpr int64_t kPageBytes = kWidth * kWidth * 4;

// Each weight is a page.
torch::nn::Sequential make_layers() {
  return testing::square_layers(kLayers, kWidth);
}

Options offloading(StepWhen when, Tier tier, const std::string& folder, int stage = 3) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4096;
  options.offload = {.optimizer = tier, .step = when};
  if (stage == 3) options.offload.parameters = tier;
  if (tier == Tier::kNvme) options.offload.nvme_directory = folder;
  return options;
}

using Model = DistributedDataParallel<torch::nn::Sequential>;

struct Figures {
  std::vector<torch::Tensor> weights;
  std::vector<double> norms;
  int64_t host_gradient_bytes = 0;  // at the peak
  int64_t planned_gradient_bytes = 0;
};

// Figures of rank 0.
Figures run_with(int ranks, const Options& options, int64_t micro_steps) {
  Figures run;
  std::mutex random;
  run_ranks(ranks, [&](comm::World& world) {
    torch::nn::Sequential layers = nullptr;
    {
      const std::lock_guard lock(random);
      torch::manual_seed(3);
      layers = make_layers();
    }
    Model model(layers, world, options);
    Optimizer<torch::optim::AdamW> optimizer(model);
    Accumulator accumulator(model, {.micro_steps = micro_steps});
    Ledger& ledger = *Ledger::current();
    ledger.reset_peak();
    Figures own;
    for (int step = 0; step < 3; ++step) {
      for (int64_t micro_step = 0; micro_step < micro_steps; ++micro_step) {
        auto generator = at::detail::createCPUGenerator(
            static_cast<uint64_t>(1 + 100 * step + 10 * micro_step + world.rank()));
        accumulator.backward(model(torch::randn({4, kWidth}, generator)).square().mean());
      }
      own.norms.push_back(accumulator.step(optimizer).norm);
    }
    own.host_gradient_bytes = ledger.offloaded_at_peak(Tier::kHost)[Kind::kGradient];
    own.planned_gradient_bytes =
        sharded_parameters_of(model).pages->plan().held(2)[Tier::kHost][Kind::kGradient];
    visit_parameters(model, [&](const std::string&, const torch::Tensor& values) {
      own.weights.push_back(values.clone());
    });
    if (world.rank() == 0) run = own;
  });
  return run;
}

class PassingGradientsTest : public ::testing::TestWithParam<std::tuple<int, int, Tier>> {};

TEST_P(PassingGradientsTest, TakeAFewPagesAndGiveTheBitsAndNormsOfAStepInStep) {
  const auto [ranks, stage, tier] = GetParam();
  const testing::DiskFolder folder;
  for (const int64_t micro_steps : {1, 3}) {
    SCOPED_TRACE(micro_steps);
    const Figures in_step =
        run_with(ranks, offloading(StepWhen::kInStep, tier, folder.path(), stage), micro_steps);
    const Figures in_backward =
        run_with(ranks, offloading(StepWhen::kInBackward, tier, folder.path(), stage), micro_steps);
    EXPECT_TRUE(testing::same_bits(in_step.weights, in_backward.weights));
    EXPECT_EQ(in_step.norms, in_backward.norms);
    EXPECT_EQ(in_step.host_gradient_bytes, kLayers * kPageBytes / ranks);
    EXPECT_EQ(in_backward.host_gradient_bytes,
              static_cast<int64_t>(zero::TransientStorage::kBuffers) * kPageBytes / ranks);
    EXPECT_EQ(in_backward.planned_gradient_bytes, in_backward.host_gradient_bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(RanksStagesTiers, PassingGradientsTest,
                         ::testing::Values(std::tuple(1, 3, Tier::kNvme),
                                           std::tuple(2, 2, Tier::kHost),
                                           std::tuple(2, 1, Tier::kHost)));

// A simulated world charges what a real one does.
TEST(PassingGradientsPlanTest, ArePlannedAsTheyAre) {
  PlanOptions options;
  options.training = offloading(StepWhen::kInStep, Tier::kDevice, "");
  options.training.offload = {};
  options.tiers = {Tier::kHost};
  options.stages = {3};
  options.policies = {CheckpointPolicy::kNone};
  options.paging = {{.page_bytes = 4096}, {.page_bytes = 4096, .step = StepWhen::kInBackward}};
  const Plan plan = zeropage::plan(make_layers, torch::empty({4, kWidth}), {.ranks = 2}, options);
  int compared = 0;
  for (const Forecast& forecast : plan.forecasts) {
    const bool passes = forecast.setting.paging.step == StepWhen::kInBackward;
    const int64_t pages = passes ? static_cast<int64_t>(zero::TransientStorage::kBuffers) : kLayers;
    EXPECT_EQ(forecast.at_peak[Tier::kHost][Kind::kGradient], pages * kPageBytes / 2)
        << to_string(forecast.setting);
    EXPECT_EQ(forecast.held[Tier::kHost][Kind::kGradient], pages * kPageBytes / 2);
    ++compared;
  }
  // Parameters stay, or leave with the optimizer.
  EXPECT_EQ(compared, 4);
}

// The norm that an accumulation's step reported is not that of a backward by itself.
TEST(PassingGradientsErrorTest, ABackwardWithoutAnAccumulatorHasNoNormThoughAStepBeforeHadOne) {
  run_ranks(2, [](comm::World& world) {
    Model model(make_layers(), world, offloading(StepWhen::kInBackward, Tier::kHost, ""));
    Optimizer<torch::optim::AdamW> optimizer(model);
    {
      Accumulator accumulator(model);
      accumulator.backward(model(torch::ones({1, kWidth})).square().mean());
      EXPECT_GT(accumulator.step(optimizer).norm, 0);
    }
    model(torch::ones({1, kWidth})).sum().backward();
    EXPECT_THAT(error_of([&] { gradient_norm(model); }),
                HasSubstr("norms of gradients after backward, which has made the step with them"));
    optimizer.step();
  });
}

TEST(PassingGradientsErrorTest, WhatIsGoneIsRefusedInWords) {
  run_ranks(2, [](comm::World& world) {
    Model model(make_layers(), world, offloading(StepWhen::kInBackward, Tier::kHost, ""));
    Optimizer<torch::optim::AdamW> optimizer(model);
    const auto backward = [&] { model(torch::ones({1, kWidth})).sum().backward(); };
    backward();
    optimizer.step();
    EXPECT_THAT(error_of([&] { gradient_norm(model); }), HasSubstr("use an Accumulator"));
    EXPECT_THAT(error_of([&] { model.parameters()[0].grad().sum(); }),
                HasSubstr("freed as soon as backward had updated its page"));
    // It would be added to the next one.
    EXPECT_THAT(error_of(backward), HasSubstr("zero_grad() before the next backward()"));
  });
  run_ranks(2, [](comm::World& world) {
    Model model(make_layers(), world, offloading(StepWhen::kInBackward, Tier::kHost, ""));
    Optimizer<torch::optim::AdamW> optimizer(model);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      model(torch::ones({1, kWidth})).sum().backward();
      optimizer.step();
    }
  });
}

}  // namespace
}  // namespace zeropage::passing_gradients_test

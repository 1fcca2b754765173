// Experts on several ranks train as on one, at every stage, with other numbers of tokens on each rank.
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/fused/experts_net.h"
#include "tests/harness/ranks.h"
#include "zeropage/zeropage.h"

namespace zeropage::experts_sharded_test {
namespace {

using namespace zeropage::experts_test;
using memory::operator""_KiB;

void expect_as_plain(int ranks, int stage, const Script& script,
                     const std::function<How(int step)>& how, double tolerance) {
  at::set_num_threads(1);
  const std::vector<Tensor> expected = plainly_trained(ranks, script);
  run_ranks(ranks, [&](World& world) {
    Options options;
    options.stage = stage_of(stage);
    options.page_bytes = 4_KiB;
    options.update_by = UpdateBy::kClass;
    DistributedDataParallel<Net> model(make_net(torch::kDouble, script.capacity_factor), world,
                                       options);
    Optimizer<SGD> optimizer(model, SGDOptions(0.05).momentum(0.9));
    Accumulator accumulator(model, {.micro_steps = script.micro_steps});
    checkpointing::Recompute recompute = recompute_of(model, how(0), script.least_bytes);
    for (int step = 0; step < script.steps; ++step) {
      for (int micro = 0; micro < script.micro_steps; ++micro) {
        const int at = step * script.micro_steps + micro;
        const Tensor x = batch_of(world.rank(), at, script.tokens(world.rank(), at));
        const Tensor loss = loss_of(outputs_of(model, x, how(step), recompute));
        accumulator.backward(loss + model->auxiliary_loss());
      }
      accumulator.step(optimizer);
      model->update_balance(world);
    }
    const GatheredParameters gathered(model);
    std::vector<Tensor> actual = model.module()->parameters();
    for (const Tensor& buffer : model.buffers()) actual.push_back(buffer);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_LE((actual[i].detach() - expected[i].detach()).abs().max().item<double>(), tolerance)
          << i << " on rank " << world.rank();
    }
  });
}

class ShardedExpertsTest : public ::testing::TestWithParam<std::tuple<int, int, How>> {};

TEST_P(ShardedExpertsTest, TrainAsOnOneRank) {
  const auto [stage, ranks, how] = GetParam();
  const Script script;
  expect_as_plain(
      ranks, stage, script, [how = how](int) { return how; }, 1e-12);
}

std::string way_of(const ::testing::TestParamInfo<std::tuple<int, int, How>>& info) {
  return c10::str("AtStage", std::get<0>(info.param), "On", std::get<1>(info.param), "Ranks",
                  kWays[static_cast<int>(std::get<2>(info.param))]);
}

INSTANTIATE_TEST_SUITE_P(StagesRanksAndWays, ShardedExpertsTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::Values(2, 4),
                                            ::testing::Values(How::kPlainly, How::kInARegion,
                                                              How::kRecomputed,
                                                              How::kRecomputedByBlocks)),
                         way_of);

// Some tensors of a rank with many tokens are large, and those of one with few are small: both repeat the same operators.
TEST(ShardedExpertsTest, RecomputeTheSameOfFewTokensAndOfMany) {
  for (const How how : {How::kRecomputed, How::kRecomputedByBlocks}) {
    for (const double capacity_factor : {0.0, 0.6}) {
      expect_as_plain(
          3, 3, uneven_script(capacity_factor), [how](int) { return how; }, 1e-12);
    }
  }
}

TEST(ShardedExpertsTest, AccumulateMicroStepsAsOnOneRank) {
  Script script;
  script.micro_steps = 3;
  for (const int stage : {1, 3})
    expect_as_plain(
        2, stage, script, [](int) { return How::kPlainly; }, 1e-12);
}

TEST(ShardedExpertsTest, RunThreeHundredStepsOfRandomTokensWithoutDrift) {
  Script script;
  script.steps = 300;
  script.tokens = [](int rank, int step) {
    std::mt19937 random(static_cast<unsigned>(1000 * rank + step));
    return random() % 4 == 0 ? int64_t{0} : static_cast<int64_t>(random() % 17);
  };
  const auto how = [](int step) { return static_cast<How>(step / 7 % 2); };
  expect_as_plain(3, 3, script, how, 1e-9);
}

TEST(ShardedExpertsTest, TrainInBf16UnderMasterWeights) {
  at::set_num_threads(1);
  std::vector<double> losses(2);
  run_ranks(2, [&](World& world) {
    Options options;
    options.stage = stage_of(3);
    options.page_bytes = 4_KiB;
    options.compute_dtype = torch::kBFloat16;
    DistributedDataParallel<Net> model(make_net(torch::kFloat), world, options);
    Optimizer<SGD> optimizer(model, SGDOptions(0.05));
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      const Tensor x = batch_of(world.rank(), 0, 8).to(torch::kFloat);
      const Tensor loss = loss_of(model(x).to(torch::kFloat));
      (loss + model->auxiliary_loss()).backward();
      optimizer.step();
      model->update_balance(world);
      if (world.rank() == 0) losses[step == 0 ? 0 : 1] = loss.item<double>();
    }
    EXPECT_EQ(model->first->balance_bias.scalar_type(), torch::kFloat);
  });
  EXPECT_LT(losses[1], 0.7 * losses[0]);
}

TEST(ShardedExpertsTest, ArePlannedWithoutAToken) {
  const Tensor x = torch::zeros({4, 16, kWidth}, torch::kDouble);
  const Plan plan = zeropage::plan(
      [] { return make_net(); }, std::make_tuple(x), {.ranks = 2},
      {.tiers = {Tier::kDevice}, .stages = {3}, .policies = {CheckpointPolicy::kNone}});
  EXPECT_GT(plan.forecasts.front().at_peak[Tier::kDevice].activations(), 0);
}

}  // namespace
}  // namespace zeropage::experts_sharded_test

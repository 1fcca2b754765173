// Predicted seconds: how they add up, and that the machine's speeds are kept.
#include "planning/step_time.h"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "zeropage/plan.h"

namespace zeropage::step_time_test {
namespace {

using memory::Tier;
using ::testing::HasSubstr;

constexpr MachineSpeeds kSpeeds = {.product_flops_per_second = 100,
                                   .elementwise_bytes_per_second = 10,
                                   .memory_bytes_per_second = 36,
                                   .link = {.latency_seconds = 0.5, .bytes_per_second = 20},
                                   .disk_read_bytes_per_second = 4,
                                   .disk_write_bytes_per_second = 2,
                                   .cores = 4};

TEST(StepTimeTest, AddsWhatIsComputedAndSent) {
  const planning::StepThreads one{.threads_of_rank = 1};
  EXPECT_DOUBLE_EQ(planning::step_seconds({.forward_flops = 100}, kSpeeds, one), 3);
  EXPECT_DOUBLE_EQ(
      planning::step_seconds({.forward_flops = 100, .recomputed_flops = 50}, kSpeeds, one), 3.5);
  EXPECT_DOUBLE_EQ(
      planning::step_seconds({.forward_bytes = 10, .recomputed_bytes = 10}, kSpeeds, one), 4);
  EXPECT_DOUBLE_EQ(planning::step_seconds({.updated_elements = 2}, kSpeeds, one), 2);
  EXPECT_DOUBLE_EQ(planning::step_seconds({.sent_bytes = 20, .messages = 2}, kSpeeds, one), 2);
  EXPECT_DOUBLE_EQ(planning::step_seconds({.forward_flops = 100, .sent_bytes = 20}, kSpeeds, one),
                   4);
}

TEST(StepTimeTest, DividesTheCoresOfAHostAmongItsRanks) {
  const planning::StepWork work{.forward_flops = 100};
  EXPECT_DOUBLE_EQ(planning::step_seconds(work, kSpeeds, {}), 0.75);
  EXPECT_DOUBLE_EQ(planning::step_seconds(work, kSpeeds, {.ranks_of_host = 2}), 1.5);
  EXPECT_DOUBLE_EQ(
      planning::step_seconds(work, kSpeeds, {.ranks_of_host = 2, .threads_of_rank = 1}), 3);
  // More ranks than cores.
  EXPECT_DOUBLE_EQ(
      planning::step_seconds(work, kSpeeds, {.ranks_of_host = 8, .threads_of_rank = 1}), 6);
}

TEST(StepTimeTest, TakesTheLongerOfComputeAndDisk) {
  const planning::StepThreads one{.threads_of_rank = 1};
  const planning::StepWork work{
      .forward_flops = 100, .disk_read_bytes = 4, .disk_written_bytes = 2};
  EXPECT_DOUBLE_EQ(planning::step_seconds(work, kSpeeds, one), 3);
  const planning::StepWork slow{
      .forward_flops = 100, .disk_read_bytes = 16, .disk_written_bytes = 2};
  EXPECT_DOUBLE_EQ(planning::step_seconds(slow, kSpeeds, one), 5);
}

torch::nn::Sequential make_layers() {
  torch::nn::Sequential layers;
  for (int layer = 0; layer < 4; ++layer) {
    layers->push_back(torch::nn::Linear(64, 64));
    layers->push_back(torch::nn::GELU());
  }
  return layers;
}

TEST(StepTimeTest, PutsTheFastestFirstWhereSpeedsAreKnown) {
  const auto plan_with = [](const MachineSpeeds& speeds) {
    return plan(make_layers, torch::zeros({8, 64}), {.ranks = 2},
                {.tiers = {Tier::kDevice}, .speeds = speeds});
  };
  const Plan plain = plan_with({});
  EXPECT_EQ(plain.forecasts.front().seconds, 0);
  const Plan timed = plan_with(kSpeeds);
  ASSERT_EQ(timed.forecasts.size(), plain.forecasts.size());
  for (size_t index = 1; index < timed.forecasts.size(); ++index) {
    EXPECT_LE(timed.forecasts[index - 1].seconds, 1.06 * timed.forecasts[index].seconds);
  }
  EXPECT_THAT(timed.to_string(), HasSubstr("the fastest first"));
  // Products of forward, three times; inputs and outputs of GELU and the mean; the update; what is sent.
  const auto at =
      std::find_if(timed.forecasts.begin(), timed.forecasts.end(), [](const Forecast& forecast) {
        return text_of(forecast.setting.stage) == "0" &&
               forecast.setting.checkpointing == CheckpointPolicy::kNone;
      });
  ASSERT_NE(at, timed.forecasts.end());
  const double forward_bytes = 4 * (2 * 8 * 64 * 4) + 8 * 64 * 4 + 4;
  const planning::StepWork work{.forward_flops = at->flops / 3,
                                .forward_bytes = forward_bytes,
                                .updated_elements = 4 * (64 * 64 + 64),
                                .sent_bytes = static_cast<double>(at->sent.total().bytes),
                                .messages = static_cast<double>(at->sent.total().messages)};
  EXPECT_NEAR(at->seconds, planning::step_seconds(work, kSpeeds, {.ranks_of_host = 2}),
              0.02 * at->seconds);
}

TEST(MachineSpeedsTest, AreMeasuredOnceAndKept) {
  const testing::DiskFolder folder;
  const std::string cache = folder.path() + "/speeds.json";
  const MachineSpeeds measured = machine_speeds({.cache = cache});
  EXPECT_GT(measured.product_flops_per_second, 1e8);
  EXPECT_GT(measured.elementwise_bytes_per_second, 1e6);
  EXPECT_GT(measured.memory_bytes_per_second, 1e8);
  EXPECT_GT(measured.link.bytes_per_second, 1e6);
  EXPECT_GT(measured.cores, 0);
  EXPECT_THAT(to_string(measured), HasSubstr(" GFLOP/s of products"));
  nlohmann::json kept = nlohmann::json::parse(std::ifstream(cache));
  ASSERT_EQ(kept.size(), 1U);
  kept.front()["product_flops_per_second"] = 7;
  std::ofstream(cache) << kept;
  EXPECT_EQ(machine_speeds({.cache = cache}).product_flops_per_second, 7) << "it is read";
  kept.front().erase("cores");
  std::ofstream(cache) << kept;
  EXPECT_THAT(testing::error_of([&] { machine_speeds({.cache = cache}); }),
              HasSubstr("is not as this program writes it; remove the file"));
  std::ofstream(cache) << "no json";
  EXPECT_THAT(testing::error_of([&] { machine_speeds({.cache = cache}); }),
              HasSubstr("expected a JSON object"));
}

}  // namespace
}  // namespace zeropage::step_time_test

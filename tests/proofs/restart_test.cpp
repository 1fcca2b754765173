// A run that goes on from its saved state has the bits of one that never stopped, wherever it goes on;
// and the same state is the same bytes on disk, whatever it was sharded over.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/restarts.h"

namespace zeropage::restart_test {
namespace {

using namespace zeropage::testing;
using memory::Tier;
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using memory::operator""_KiB;

constexpr int kSaveAfter = 2;
constexpr int kSteps = 4;

const AdamWOptions kAdamW = AdamWOptions(0.01);

// Weights that begin within a block of 8-bit states, two in a page; biases that keep fp32.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    first = register_module("first", torch::nn::Linear(7, 701));
    last = register_module("last", torch::nn::Linear(701, 7));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(Wide);

struct LargeImpl : torch::nn::Module {
  LargeImpl() { layer = register_module("layer", torch::nn::Linear(7, 400'001)); }
  torch::Tensor forward(const torch::Tensor& x) { return layer(x).narrow(1, 0, 7); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Large);

template <typename Module, typename A = AdamW>
void expect_restart_has_the_same_bits(const Setting& before, const Setting& after,
                                      const typename OptimizerTraits<A>::Options& algorithm) {
  const DiskFolder folder;
  const std::string path = folder.path() + "/step-2";
  const auto expected = trained<Module, A>(before, {.end = kSteps}, algorithm);
  trained<Module, A>(before, {.end = kSaveAfter, .save = path}, algorithm);
  const auto resumed =
      trained<Module, A>(after, {.first = kSaveAfter, .end = kSteps, .load = path}, algorithm);
  EXPECT_TRUE(same_bits(expected, resumed));
}

struct Move {
  int stage, ranks, to_stage, to_ranks;
};

class RestartTest : public ::testing::TestWithParam<Move> {};

TEST_P(RestartTest, GoesOnWithTheSameBits) {
  const Move move = GetParam();
  expect_restart_has_the_same_bits<Oddball>({move.stage, move.ranks},
                                            {move.to_stage, move.to_ranks}, kAdamW);
}

INSTANTIATE_TEST_SUITE_P(Moves, RestartTest,
                         ::testing::Values(Move{0, 1, 3, 4}, Move{0, 2, 1, 1}, Move{1, 2, 2, 2},
                                           Move{1, 3, 1, 3}, Move{1, 4, 0, 1}, Move{2, 4, 3, 2},
                                           Move{3, 1, 0, 2}, Move{3, 2, 1, 4}, Move{3, 4, 3, 1},
                                           Move{0, 3, 2, 3}, Move{3, 3, 0, 3}, Move{2, 1, 2, 4}),
                         [](const auto& info) {
                           return c10::str("Stage", info.param.stage, "On", info.param.ranks,
                                           "ToStage", info.param.to_stage, "On",
                                           info.param.to_ranks);
                         });

Options with(const std::function<void(Options&)>& change) {
  Options options;
  change(options);
  return options;
}

Options in_bf16(LowPrecisionUpdate update) {
  return with([&](Options& options) {
    options.compute_dtype = torch::kBFloat16;
    options.low_precision_update = update;
    options.rounding_seed = 3;
  });
}

TEST(RestartFormatsTest, LowPrecisionGoesOnWithTheSameBits) {
  for (const auto update :
       {LowPrecisionUpdate::kMasterWeights, LowPrecisionUpdate::kSplitMasterWeights,
        LowPrecisionUpdate::kStochasticRounding, LowPrecisionUpdate::kNearest}) {
    SCOPED_TRACE(static_cast<int>(update));
    expect_restart_has_the_same_bits<Oddball>({3, 2, in_bf16(update)}, {1, 4, in_bf16(update)},
                                              kAdamW);
  }
}

TEST(RestartFormatsTest, SmallStatesGoOnWithTheSameBits) {
  for (const StateFormat format : {StateFormat::kBf16, StateFormat::k8Bit}) {
    SCOPED_TRACE(static_cast<int>(format));
    const Options options = with([&](Options& of) {
      of.optimizer_state = format;
      of.page_bytes = 64_KiB;
    });
    expect_restart_has_the_same_bits<Wide>({3, 2, options}, {0, 4, options}, kAdamW);
  }
}

TEST(RestartFormatsTest, OtherOptimizersGoOnWithTheSameBits) {
  using namespace torch::optim;
  const Setting before{3, 2};
  const Setting after{1, 4};
  expect_restart_has_the_same_bits<Oddball, Adam>(before, after, AdamOptions(0.01).amsgrad(true));
  expect_restart_has_the_same_bits<Oddball, SGD>(before, after, SGDOptions(0.1).momentum(0.9));
  expect_restart_has_the_same_bits<Oddball, SGD>(before, after, SGDOptions(0.1));
  expect_restart_has_the_same_bits<Oddball, Adagrad>(before, after, AdagradOptions(0.1));
  expect_restart_has_the_same_bits<Oddball, Lion>(before, after, LionOptions(0.01));
  // Without a fused form: the class's own state.
  expect_restart_has_the_same_bits<Oddball, RMSprop>(before, after,
                                                     RMSpropOptions(0.01).momentum(0.9));
}

TEST(RestartFormatsTest, AClassesOwnUpdateGoesOnWithTheSameBits) {
  const Options by_class = with([](Options& options) { options.update_by = UpdateBy::kClass; });
  expect_restart_has_the_same_bits<Oddball>({0, 2, by_class}, {3, 4, by_class}, kAdamW);
  expect_restart_has_the_same_bits<Oddball, torch::optim::SGD>(
      {1, 2, by_class}, {2, 1, by_class}, torch::optim::SGDOptions(0.1).momentum(0.9));
}

TEST(RestartFormatsTest, WhatIsOffloadedGoesOnWithTheSameBits) {
  const DiskFolder disk;
  for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
    SCOPED_TRACE(static_cast<int>(tier));
    const auto offloaded = [&](bool parameters) {
      return with([&](Options& options) {
        options.offload.optimizer = tier;
        if (parameters) options.offload.parameters = tier;
        if (tier == Tier::kNvme) options.offload.nvme_directory = disk.path();
      });
    };
    expect_restart_has_the_same_bits<Oddball>({3, 2, offloaded(true)}, {1, 1}, kAdamW);
    expect_restart_has_the_same_bits<Oddball>({1, 1}, {3, 2, offloaded(true)}, kAdamW);
    expect_restart_has_the_same_bits<Oddball>({0, 2, offloaded(false)}, {2, 2, offloaded(false)},
                                              kAdamW);
  }
}

TEST(RestartFormatsTest, MasterWeightsThatAreOffloadedGoOnWithTheSameBits) {
  Options options = in_bf16(LowPrecisionUpdate::kMasterWeights);
  options.offload.optimizer = Tier::kHost;
  const Setting kept{1, 2, in_bf16(LowPrecisionUpdate::kMasterWeights)};
  expect_restart_has_the_same_bits<Oddball>({2, 2, options}, kept, kAdamW);
  options.offload.parameters = Tier::kHost;
  expect_restart_has_the_same_bits<Oddball>(kept, {3, 2, options}, kAdamW);
}

// ---- the bytes ----

template <typename Module>
void expect_the_same_bytes(const std::vector<Setting>& settings, int steps = 3) {
  const DiskFolder folder;
  std::map<std::string, std::string> expected;
  for (size_t index = 0; index < settings.size(); ++index) {
    const std::string path = c10::str(folder.path(), "/", index, "/step-3");
    trained<Module>(settings[index], {.end = steps, .save = path}, kAdamW);
    const auto files = files_of(path);
    ASSERT_EQ(files.size(), 3U);
    if (index == 0) expected = files;
    for (const auto& [name, bytes] : expected) {
      EXPECT_TRUE(files.at(name) == bytes) << name << " of setting " << index;
    }
  }
}

TEST(CanonicalStateTest, IsTheSameBytesForAnyStageRanksPagesAndOffload) {
  std::vector<Setting> settings;
  for (const int ranks : {1, 2, 4}) {
    for (const int stage : {0, 1, 2, 3}) settings.push_back({stage, ranks});
  }
  settings.push_back({2, 2, with([](Options& options) { options.page_bytes = 16384; })});
  settings.push_back({1, 4, with([](Options& options) { options.page_bytes = 1 << 20; })});
  settings.push_back({3, 2, with([](Options& options) {
                        options.offload.optimizer = Tier::kHost;
                        options.offload.parameters = Tier::kHost;
                      })});
  expect_the_same_bytes<Oddball>(settings);
}

TEST(CanonicalStateTest, IsTheSameBytesInLowPrecision) {
  std::vector<Setting> settings;
  for (const int stage : {0, 3}) {
    for (const int ranks : {1, 2, 4}) {
      settings.push_back({stage, ranks, in_bf16(LowPrecisionUpdate::kMasterWeights)});
    }
  }
  expect_the_same_bytes<Oddball>(settings);
}

TEST(CanonicalStateTest, IsTheSameBytesAfterItWasLoadedElsewhere) {
  const DiskFolder folder;
  const std::string path = folder.path() + "/step-2";
  trained<Oddball>({1, 2}, {.end = 2, .save = path}, kAdamW);
  for (const Setting& setting : {Setting{3, 4}, Setting{0, 1}, Setting{2, 3}}) {
    const std::string again = folder.path() + "/again/step-2";
    trained<Oddball>(setting, {.end = 0, .load = path, .save = again}, kAdamW);
    EXPECT_TRUE(files_of(path) == files_of(again)) << setting.stage << " " << setting.ranks;
  }
}

// Three ranks' shards end within blocks and sectors.
TEST(CanonicalStateTest, LargeTensorsOfManyBlocksAreTheSameBytes) {
  expect_the_same_bytes<Large>({{3, 1}, {3, 3}, {1, 2}}, /*steps=*/0);
}

}  // namespace
}  // namespace zeropage::restart_test

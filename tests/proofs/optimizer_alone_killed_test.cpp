// A plain module with an Optimizer alone, in a loop as scripts have it: accumulation, clipping, an average of the weights, a state
// after each step. All ranks are killed by SIGKILL, and what goes on at another number of ranks ends in the bits of the wrapped
// module that nobody stopped.
#include <filesystem>
#include <signal.h>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/launched_process.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/zeropage.h"

namespace zeropage::optimizer_alone_killed_test {
namespace {

using namespace zeropage::testing;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int kSteps = 24;
constexpr int64_t kMicroSteps = 2;

Options options(int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4096;
  return options;
}

Transformer seeded() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(3);
  return Transformer();
}

// One step, alike for both. All ranks have the same samples: their mean has the bits of one gradient for a power of two of ranks.
template <typename Forward, typename Model>
void train_step(int step, Model& accumulated, const Transformer& net, const Forward& forward,
                torch::optim::Optimizer& optimizer, WeightAverage& average) {
  for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
    const Samples samples = samples_of(0, kMicroSteps * step + static_cast<int>(micro));
    accumulated.backward(loss_of(forward(samples.inputs), samples));
  }
  torch::nn::utils::clip_grad_norm_(distinct_parameters(net), 0.2);
  accumulated.step(optimizer);
  average.update();
}

std::vector<torch::Tensor> values_of(const Transformer& net, WeightAverage& average) {
  std::vector<torch::Tensor> values;
  for (const auto& parameter : net->parameters()) values.push_back(parameter.detach().clone());
  const torch::NoGradGuard no_grad;
  average.swap_in();
  for (const auto& parameter : net->parameters()) values.push_back(parameter.detach().clone());
  average.swap_out();
  return values;
}

// Goes on from the last state there is, whose step `first` is. said: is told of each step that is on disk; empty: none is saved.
std::vector<torch::Tensor> train_alone(World& world, int stage, const std::filesystem::path& run,
                                       int end, int& first, const std::function<void(int)>& said) {
  at::set_num_threads(1);
  Transformer net = seeded();
  Optimizer<AdamW> optimizer(distinct_parameters(net), world, AdamWOptions(0.01), options(stage));
  WeightAverage average(optimizer, {.decay = 0.75});
  Accumulator accumulator(optimizer, {.micro_steps = kMicroSteps});
  first = 0;
  if (std::filesystem::exists(run / "latest")) {
    RunState state{.average = &average};
    load_state(run, net, optimizer, state);
    first = static_cast<int>(state.step);
  }
  StateSaver saver(run, world, {.keep_last = 2});
  const auto forward = [&](const torch::Tensor& x) { return net->forward(x); };
  for (int step = first; step < end; ++step) {
    train_step(step, accumulator, net, forward, optimizer, average);
    if (!said) continue;
    saver.save(net, optimizer, {.step = step + 1, .average = &average});
    saver.wait();
    said(step + 1);
  }
  return values_of(net, average);
}

std::vector<torch::Tensor> train_wrapped(World& world, int end) {
  Transformer net = seeded();
  DistributedDataParallel<Transformer> model(net, world, options(1));
  Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
  WeightAverage average(model, {.decay = 0.75});
  Accumulator accumulator(model, {.micro_steps = kMicroSteps});
  const auto forward = [&](const torch::Tensor& x) { return model(x); };
  for (int step = 0; step < end; ++step) {
    train_step(step, accumulator, net, forward, optimizer, average);
  }
  return values_of(net, average);
}

class OptimizerAloneKilledTest : public ::testing::TestWithParam<int> {};

TEST_P(OptimizerAloneKilledTest, GoesOnAtOtherNumbersOfRanksWithTheBitsOfTheWrapper) {
  const int stage = GetParam();
  const DiskFolder folder;
  const std::filesystem::path run = std::filesystem::path(folder.path()) / "run";
  {
    comm::LaunchedProcess launched([&] {
      return World::launch(2, [&](World& world) {
        int first = 0;
        train_alone(world, stage, run, /*end=*/100'000, first, [&](int step) {
          if (world.rank() == 0) std::printf("step=%d\n", step);
        });
        return 0;
      });
    });
    // Somewhere in a step or a save behind the third.
    const auto is_saved = [&] { return launched.out().find("step=3\n") != std::string::npos; };
    ASSERT_TRUE(comm::holds_within(60, is_saved)) << launched.err();
    launched.signal(SIGKILL);
    EXPECT_EQ(launched.wait(), -SIGKILL);
  }
  std::vector<torch::Tensor> expected, one, four;
  int begun = 0;
  run_ranks(2, [&](World& world) {
    const auto values = train_wrapped(world, kSteps);
    if (world.rank() == 0) expected = values;
  });
  const auto resumed = [&](int ranks) {
    std::vector<torch::Tensor> values;
    run_ranks(ranks, [&](World& world) {
      int first = 0;
      auto own = train_alone(world, stage, run, kSteps, first, nullptr);
      if (world.rank() != 0) return;
      values = std::move(own);
      begun = first;
    });
    return values;
  };
  one = resumed(1);
  EXPECT_GE(begun, 3) << "it began anew";
  EXPECT_LT(begun, kSteps);
  four = resumed(4);
  EXPECT_TRUE(same_bits(expected, one));
  EXPECT_TRUE(same_bits(expected, four));
}

INSTANTIATE_TEST_SUITE_P(Stages, OptimizerAloneKilledTest, ::testing::Values(0, 1));

}  // namespace
}  // namespace zeropage::optimizer_alone_killed_test

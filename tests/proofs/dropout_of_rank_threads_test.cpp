// Dropout under DistributedDataParallel where ranks are threads, which draw from one generator: at every stage, gradients are those of the masks
// that forward drew, though backward draws them again.
#include <thread>

#include <gtest/gtest.h>

#include "tests/harness/accumulated.h"
#include "tests/harness/ranks.h"
#include "zeropage/zeropage.h"

namespace zeropage::dropout_of_rank_threads_test {
namespace {

using checkpointing::RecomputeOptions;
using testing::run_ranks;
using torch::Tensor;

void another_thread_draws() {
  std::jthread([] { torch::rand({5}); });
}

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    up = register_module("up", torch::nn::Linear(16, 24));
    down = register_module("down", torch::nn::Linear(24, 16));
  }
  Tensor forward(const Tensor& x) {
    Tensor hidden = torch::dropout(torch::relu(up(x)), 0.5, true);
    if (noted != nullptr) noted->push_back(hidden.detach().clone());
    another_thread_draws();
    return x + down(hidden);
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  std::vector<Tensor>* noted = nullptr;
};
TORCH_MODULE(Mlp);

enum class By { kRegions, kOperators, kBlocks };

struct NetImpl : torch::nn::Module {
  NetImpl() {
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int block = 0; block < 4; ++block) blocks->push_back(Mlp());
  }
  Tensor forward(const Tensor& x) { return checkpointing::checkpoint_each<Mlp>(blocks, every, x); }
  checkpointing::EveryBlocks every = checkpointing::EveryBlocks::none();
  torch::nn::ModuleList blocks{nullptr};
};
TORCH_MODULE(Net);

// Gradients of the loss, with the masks that forward is given: which elements it kept.
std::vector<Tensor> gradients_with(const std::vector<Tensor>& weights, const Tensor& input,
                                   const std::vector<Tensor>& masks) {
  std::vector<Tensor> leaves;
  for (const Tensor& weight : weights) leaves.push_back(weight.detach().clone().requires_grad_());
  Tensor x = input;
  for (size_t block = 0; block < masks.size(); ++block) {
    const Tensor* of_block = &leaves[4 * block];
    const Tensor kept = torch::relu(torch::linear(x, of_block[0], of_block[1])) * masks[block] * 2;
    x = x + torch::linear(kept, of_block[2], of_block[3]);
  }
  return torch::autograd::grad({x.square().mean()}, leaves);
}

class DropoutOfRankThreadsTest : public ::testing::TestWithParam<std::tuple<int, int, By>> {};

TEST_P(DropoutOfRankThreadsTest, GradientsAreThoseOfTheMasksThatForwardDrew) {
  const auto [ranks, stage, by] = GetParam();
  run_ranks(ranks, [stage, by](comm::World& world) {
    Options options;
    options.stage = stage_of(stage);
    options.page_bytes = 4096;
    DistributedDataParallel<Net> model(Net(), world, options);
    std::vector<Tensor> weights;
    for (const Tensor& parameter : model.parameters())
      weights.push_back(parameter.detach().clone());
    auto plan = by == By::kBlocks
                    ? RecomputeOptions::by_blocks(checkpointing::find_blocks(*model.module()))
                    : RecomputeOptions::selective();
    if (by == By::kRegions) {
      plan = RecomputeOptions::nothing();
      model->every = checkpointing::EveryBlocks::each();
    }
    plan.least_bytes = 0;
    auto recompute = zeropage::recompute(model, plan);
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      std::vector<Tensor> noted;
      const auto note_in = [&](std::vector<Tensor>* place) {
        for (const auto& block : *model->blocks) block->as<Mlp>()->noted = place;
      };
      note_in(&noted);
      const Tensor input = torch::randn({32, 16});
      Tensor loss;
      {
        const ActivationScope scope(recompute);
        loss = model(input).square().mean();
      }
      note_in(nullptr);
      loss.backward();
      std::vector<Tensor> masks;
      for (const Tensor& hidden : noted) masks.push_back((hidden != 0).to(torch::kFloat));
      const auto expected = gradients_with(weights, input, masks);
      const auto parameters = model.parameters();
      for (size_t index = 0; index < parameters.size(); ++index) {
        EXPECT_TRUE(
            torch::allclose(parameters[index].grad() * 1, world.mean(expected[index]), 1e-4, 1e-6))
            << "parameter " << index << " in step " << step;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    RanksStages, DropoutOfRankThreadsTest,
    ::testing::Combine(::testing::Values(2, 3, 4), ::testing::Values(0, 1, 2, 3),
                       ::testing::Values(By::kRegions, By::kOperators, By::kBlocks)));

}  // namespace
}  // namespace zeropage::dropout_of_rank_threads_test

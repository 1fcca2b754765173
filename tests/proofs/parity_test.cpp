// The same bits: every stage, world size, page size, module and optimizer equals plain LibTorch.
#include <gtest/gtest.h>

#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/zeropage.h"

namespace zeropage::parity_test {
namespace {

using namespace zeropage::testing;
using memory::operator""_KiB;
using memory::operator""_MiB;

constexpr int kSteps = 4;

template <typename Module>
Module make() {
  // Modules draw from the one generator of the process, and ranks are threads of it.
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  torch::manual_seed(7);
  return Module();
}

template <typename A>
MakeOptimizer plain(const typename OptimizerTraits<A>::Options& options) {
  return [options](std::vector<torch::Tensor> parameters) {
    return std::make_unique<A>(std::move(parameters), options);
  };
}

template <typename Module, typename A>
void expect_parity(int ranks, Options options,
                   const typename OptimizerTraits<A>::Options& algorithm,
                   const RankOptions& world_options = {}) {
  options.update_by = UpdateBy::kClass;  // whose bits a plain run has
  at::set_num_threads(1);
  const auto expected = train_reference<Module>(ranks, kSteps, make<Module>, plain<A>(algorithm));
  run_ranks(
      ranks,
      [&](comm::World& world) {
        DistributedDataParallel<Module> model(make<Module>(), world, options);
        Optimizer<A> optimizer(model, algorithm);
        for (int step = 0; step < kSteps; ++step) {
          const Samples samples = samples_of(world.rank(), step);
          optimizer.zero_grad();
          loss_of(model(samples.inputs), samples).backward();
          optimizer.step();
        }
        EXPECT_TRUE(same_bits(expected, model.parameters())) << "rank " << world.rank();
      },
      world_options);
}

class ParityTest : public ::testing::TestWithParam<std::tuple<int, int, int64_t>> {
 protected:
  int ranks() const { return std::get<0>(GetParam()); }
  Options options() const {
    Options options;
    options.stage = stage_of(std::get<1>(GetParam()));
    options.page_bytes = std::get<2>(GetParam());
    return options;
  }
};

TEST_P(ParityTest, OfOddParameters) {
  expect_parity<Oddball, torch::optim::AdamW>(ranks(), options(), torch::optim::AdamWOptions(0.01));
}

TEST_P(ParityTest, OfConvolutionsWithBatchNorm) {
  expect_parity<ConvNet, torch::optim::SGD>(
      ranks(), options(), torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true));
}

TEST_P(ParityTest, OfARecurrentNet) {
  expect_parity<Recurrent, torch::optim::Adam>(ranks(), options(),
                                               torch::optim::AdamOptions(0.01).amsgrad(true));
}

TEST_P(ParityTest, OfAttentionWithATiedHead) {
  expect_parity<Transformer, torch::optim::AdamW>(
      ranks(), options(), torch::optim::AdamWOptions(0.01).weight_decay(0.1));
}

TEST_P(ParityTest, OfAdagradAndRmsprop) {
  expect_parity<Oddball, torch::optim::Adagrad>(ranks(), options(),
                                                torch::optim::AdagradOptions(0.01));
  expect_parity<Oddball, torch::optim::RMSprop>(
      ranks(), options(), torch::optim::RMSpropOptions(0.01).centered(true).momentum(0.5));
}

INSTANTIATE_TEST_SUITE_P(RanksStagesPages, ParityTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 7, 8),
                                            ::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(4_KiB, 16_MiB)));

// Wider than a slice of the optimizer, so that slices end inside parameters.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    up = register_module("up", torch::nn::Linear(7, 12'007));
    down = register_module("down", torch::nn::Linear(12'007, 7));
  }
  torch::Tensor forward(const torch::Tensor& x) { return down(torch::tanh(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Wide);

class TransportParityTest : public ::testing::TestWithParam<std::tuple<comm::Transport, int, int>> {
};

TEST_P(TransportParityTest, GivesPlainLibTorchsBits) {
  const auto [transport, ranks, stage] = GetParam();
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;
  expect_parity<Transformer, torch::optim::AdamW>(ranks, options, torch::optim::AdamWOptions(0.01),
                                                  {.transport = transport});
}

INSTANTIATE_TEST_SUITE_P(
    TransportsRanksStages, TransportParityTest,
    ::testing::Combine(::testing::Values(comm::Transport::kGloo, comm::Transport::kShared),
                       ::testing::Values(2, 3, 8), ::testing::Values(0, 1, 2, 3)));

TEST(WideParityTest, HoldsWhereShardsAndSlicesEndInsideAParameter) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const int ranks : {1, 2, 3}) {
      Options options;
      options.stage = stage_of(stage);
      expect_parity<Wide, torch::optim::AdamW>(ranks, options, torch::optim::AdamWOptions(0.01));
      expect_parity<Wide, torch::optim::RMSprop>(ranks, options,
                                                 torch::optim::RMSpropOptions(0.01));
    }
  }
}

}  // namespace
}  // namespace zeropage::parity_test

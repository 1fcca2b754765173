// A simulated world runs the sharding code on tensors without memory, and counts what a real one
// sends.
#include <mutex>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/ranks.h"
#include "tests/harness/tiny_models.h"
#include "zero/agreement/agreement_hashes.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/ledger.h"
#include "zeropage/simulation.h"
#include "zeropage/zeropage.h"

namespace zeropage::simulated_figures_test {
namespace {

using comm::Topology;
using comm::Traffic;
using comm::Transport;
using comm::WireTraffic;
using comm::World;
using ::testing::HasSubstr;

// Blocks in a Sequential, so pages end with them; norms, an embedding that is the head too. A page
// of two blocks is above what is reduced in one round. [batch, 7] of int64 -> [batch, 7, 20]
struct LanguageModelImpl : torch::nn::Module {
  LanguageModelImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(20, kWidth));
    blocks = register_module("blocks", torch::nn::Sequential());
    for (int layer = 0; layer < 5; ++layer) {
      blocks->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
      blocks->push_back(torch::nn::Linear(kWidth, kWidth));
      blocks->push_back(torch::nn::GELU());
    }
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    return torch::nn::functional::linear(blocks->forward(embedding(tokens)), embedding->weight);
  }
  static constexpr int64_t kWidth = 96;
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Sequential blocks{nullptr};
};
TORCH_MODULE(LanguageModel);

torch::Tensor input_of(const testing::Oddball&, torch::Device device) {
  return torch::zeros({4, 7}, device);
}
torch::Tensor input_of(const testing::ConvNet&, torch::Device device) {
  return torch::zeros({4, 7}, device);
}
torch::Tensor input_of(const LanguageModel&, torch::Device device) {
  return torch::zeros({4, 7}, torch::TensorOptions().dtype(torch::kInt64).device(device));
}

// Wraps and trains for a few steps; the second accumulates two backwards, and gradients are read.
template <typename M>
void train(DistributedDataParallel<M>& model, torch::Device device) {
  Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    if (step == 1) {
      const auto guard = model.no_sync();
      model(input_of(model.module(), device)).square().mean().backward();
    }
    model(input_of(model.module(), device)).square().mean().backward();
    optimizer.step();
  }
  const GatheredParameters gathered(model);
}

template <typename M>
WireTraffic simulated(int rank, int size, Transport transport, const Options& options) {
  const int ranks_per_host = transport == Transport::kGloo ? 1 : size;
  const World world =
      World::simulated({.rank = rank, .topology = Topology::even(size, ranks_per_host)});
  // Without its tape, as a module that has values, which rank 0 sends.
  DeferredModule<M> deferred([] { return M(); });
  DistributedDataParallel<M> model(deferred.module(), world, options);
  train(model, torch::kMeta);
  return world.communicator().wire_traffic();
}

// All parts of a step differ with the stage, so it is named.
class SimulatedFiguresTest : public ::testing::TestWithParam<std::tuple<int, int, Transport>> {
 protected:
  Transport transport() const { return std::get<2>(GetParam()); }
  int size() const { return std::get<0>(GetParam()); }

  Options options() const {
    Options options;
    options.stage = stage_of(std::get<1>(GetParam()));
    options.page_bytes = 64 << 10;
    return options;
  }

  template <typename M>
  void expect_same_figures() const {
    std::vector<WireTraffic> sent(static_cast<size_t>(size()));
    std::mutex random;
    testing::run_ranks(size(),
                       [&](World& world) {
                         M module{nullptr};
                         {
                           const std::lock_guard lock(random);
                           module = M();
                         }
                         DistributedDataParallel<M> model(module, world, options());
                         train(model, torch::kCPU);
                         sent[static_cast<size_t>(world.rank())] =
                             world.communicator().wire_traffic();
                       },
                       {.transport = transport()});
    for (int rank = 0; rank < size(); ++rank) {
      const WireTraffic real = sent[static_cast<size_t>(rank)];
      const WireTraffic counted = simulated<M>(rank, size(), transport(), options());
      EXPECT_EQ(counted.all_gather, real.all_gather) << "rank " << rank;
      EXPECT_EQ(counted.reduce_scatter, real.reduce_scatter) << "rank " << rank;
      EXPECT_EQ(counted.all_reduce, real.all_reduce) << "rank " << rank;
      EXPECT_EQ(counted.broadcast, real.broadcast) << "rank " << rank;
      EXPECT_EQ(counted.pair, real.pair) << "rank " << rank;
      EXPECT_EQ(counted, real) << "rank " << rank;
    }
  }
};

TEST_P(SimulatedFiguresTest, AreTheRealOnesOfALanguageModel) {
  expect_same_figures<LanguageModel>();
}
TEST_P(SimulatedFiguresTest, AreTheRealOnesOfRaggedSharedFrozenAndUnusedParameters) {
  expect_same_figures<testing::Oddball>();
}
TEST_P(SimulatedFiguresTest, AreTheRealOnesOfAModuleWithBuffers) {
  expect_same_figures<testing::ConvNet>();
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, SimulatedFiguresTest,
    ::testing::Combine(::testing::Values(2, 4, 8), ::testing::Values(0, 1, 2, 3),
                       ::testing::Values(Transport::kGloo, Transport::kShared)));

class ThousandRanksTest : public ::testing::TestWithParam<int> {};

// N = 1024, a rank in the middle. A page of S elements a shard is N S elements with its padding.
TEST_P(ThousandRanksTest, SendTheFormulasBytesAStepPaddingIncluded) {
  constexpr int kRanks = 1024;
  const int stage = GetParam();
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 8 << 20;
  const World world = World::simulated({.rank = 513, .topology = Topology::even(kRanks, 1)});
  DeferredModule deferred([] {
    torch::nn::Sequential layers;
    for (int layer = 0; layer < 6; ++layer) layers->push_back(torch::nn::Linear(1000, 1000));
    return layers;
  });
  DistributedDataParallel model(std::move(deferred), world, options);
  Optimizer<torch::optim::Adam> optimizer(model, torch::optim::AdamOptions(0.1));
  const auto step = [&] {
    optimizer.zero_grad();
    model(torch::empty({2, 1000}, torch::kMeta)).sum().backward();
    optimizer.step();
  };
  step();  // records the trace
  const WireTraffic before = world.communicator().wire_traffic();
  step();
  const WireTraffic after = world.communicator().wire_traffic();
  const auto sent = [](const Traffic& later, const Traffic& earlier) {
    return later.bytes - earlier.bytes;
  };

  // (N-1)/N of all pages, which are alike: one a layer.
  const auto& pages = *sharded_parameters_of(model).pages;
  ASSERT_EQ(pages.layouts().size(), 6U);
  const int64_t page_share_bytes = (kRanks - 1) * pages.layouts().front().shard_numel * 4;
  const int64_t share_bytes = 6 * page_share_bytes;
  // Which parameters have a gradient, a byte each, and what ranks compare: to every other rank.
  const int64_t used_bytes =
      (kRanks - 1) * static_cast<int64_t>(pages.parameters().size() + zero::kToldBytes);
  const int64_t gathered = sent(after.all_gather, before.all_gather);
  const int64_t scattered = sent(after.reduce_scatter, before.reduce_scatter);
  const int64_t reduced = sent(after.all_reduce, before.all_reduce) - used_bytes;
  EXPECT_EQ(scattered, stage == 0 ? 0 : share_bytes);
  EXPECT_EQ(sent(after.broadcast, before.broadcast), 0);
  EXPECT_EQ(reduced, stage == 0 ? 2 * share_bytes : 0);
  if (stage < 3) {
    EXPECT_EQ(gathered, stage == 0 ? 0 : share_bytes);
  } else {
    // Forward gathers every page; backward all but the two that forward left, and the first, whose
    // input needs no gradient.
    EXPECT_EQ(gathered, 2 * share_bytes - 3 * page_share_bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, ThousandRanksTest, ::testing::Values(0, 1, 2, 3));

TEST(SimulatedModuleTest, TakesNoMemoryForItsParameters) {
  const auto ledger = std::make_shared<memory::Ledger>("rank 0/64");
  const memory::LedgerScope scope(ledger);
  const World world = World::simulated({.topology = Topology::even(64, 8)});
  DeferredModule deferred([] { return torch::nn::Linear(1 << 15, 1 << 15); });  // 4 GiB
  DistributedDataParallel model(std::move(deferred), world, {.stage = Stage::kParameters});
  Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(0.1));
  model(torch::empty({8, 1 << 15}, torch::kMeta)).sum().backward();
  optimizer.step();
  EXPECT_LT(ledger->at_peak().total(), 1 << 20);
  EXPECT_EQ(model.paging().faults, 2);  // of the weight's page and the bias's
  EXPECT_TRUE(model.module()->weight.is_meta());
}

TEST(SimulatedModuleTest, RefusesParametersThatHaveValues) {
  const World world = World::simulated({.topology = Topology::even(4, 1)});
  try {
    DistributedDataParallel model(torch::nn::Linear(2, 2), world);
    FAIL() << "wrapped it";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("parameter \"weight\": expected it on meta, got cpu; a simulated world "
                          "has no values: construct the module as a DeferredModule"));
  }
}

TEST(SimulatedModuleTest, EndsTrainingWhereARankIsLost) {
  const World world = World::simulated(
      {.topology = Topology::even(16, 1),
       .failures = {{.operation = comm::Operation::kReduceScatter, .call = 1, .lost_rank = 7}}});
  DistributedDataParallel model(DeferredModule([] { return torch::nn::Linear(8, 8); }), world);
  Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(0.1));
  const auto step = [&] {
    model(torch::empty({2, 8}, torch::kMeta)).sum().backward();
    optimizer.step();
  };
  step();
  try {
    step();
    FAIL() << "went on";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("reduce_scatter #"));
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("of the gradient of page \"weight .. bias\" (16.0 KiB): lost rank 7"));
  }
}

}  // namespace
}  // namespace zeropage::simulated_figures_test

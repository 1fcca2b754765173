// Regions under DistributedDataParallel: plain LibTorch's bits at every stage, pages that are gathered no oftener
// than a repetition needs, and two pages and a bucket as ever.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/exact.h"
#include "tests/harness/accumulated.h"
#include "tests/harness/delays.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/testing.h"

namespace zeropage::checkpointing_test {
namespace {

using namespace zeropage::testing;
using checkpointing::EveryBlocks;
using memory::Kind;
using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

// ---- parity ----

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    up = register_module("up", torch::nn::Linear(16, 40));
    down = register_module("down", torch::nn::Linear(40, 16));
  }
  torch::Tensor forward(torch::Tensor x) { return x + down(torch::gelu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Mlp);

// Seven blocks, of which one is frozen, and a head tied to the embedding. [batch, 7] -> [batch, 7]
struct DeepImpl : torch::nn::Module {
  DeepImpl() {
    embedding = register_parameter("embedding", torch::randn({7, 16}) * 0.3);
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int layer = 0; layer < 7; ++layer) blocks->push_back(Mlp());
    for (auto& parameter : blocks[3]->parameters()) parameter.requires_grad_(false);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = checkpointing::checkpoint_each<Mlp>(blocks, every, torch::matmul(x, embedding));
    return torch::matmul(norm(y), embedding.t());
  }
  EveryBlocks every = EveryBlocks::none();
  torch::Tensor embedding;
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Deep);

struct Case {
  int ranks = 1;
  int stage = 0;
  int micro_steps = 1;
  ReduceMicroSteps reduce = ReduceMicroSteps::kEach;
};

// Wrapped with regions, as the reference without.
void expect_parity(const Case& given, EveryBlocks every, const RankOptions& rank_options = {}) {
  constexpr int kSteps = 3;
  at::set_num_threads(1);
  const auto expected = train_accumulated_reference<Deep>(
      {.ranks = given.ranks, .micro_steps = given.micro_steps, .reduce = given.reduce}, kSteps);
  run_ranks(
      given.ranks,
      [&](comm::World& world) {
        Options options;
        options.update_by = UpdateBy::kClass;  // whose bits a plain run has
        options.stage = stage_of(given.stage);
        options.page_bytes = 4_KiB;  // a block has two or three
        DistributedDataParallel<Deep> model(make_seeded<Deep>(), world, options);
        model->every = every;
        Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
        Accumulator accumulator(model, {.micro_steps = given.micro_steps, .reduce = given.reduce});
        const int64_t replays = checkpointing::recompute_statistics().replays;
        for (int step = 0; step < kSteps; ++step) {
          accumulated_step(model, accumulator, optimizer, step);
        }
        EXPECT_TRUE(same_bits(expected, model.parameters()))
            << "rank " << world.rank() << ", stage " << given.stage << ", " << given.micro_steps
            << " micro-steps";
        EXPECT_GT(checkpointing::recompute_statistics().replays, replays);
      },
      rank_options);
}

class CheckpointingProofTest : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  Case with(int micro_steps, ReduceMicroSteps reduce = ReduceMicroSteps::kEach) const {
    return {std::get<0>(GetParam()), std::get<1>(GetParam()), micro_steps, reduce};
  }
};

TEST_P(CheckpointingProofTest, RegionsHavePlainLibTorchsBits) {
  for (const auto& every : {EveryBlocks::each(), EveryBlocks::every(2), EveryBlocks::every(3)}) {
    expect_parity(with(1), every);
  }
}

TEST_P(CheckpointingProofTest, MicroStepsOverRegionsHavePlainLibTorchsBits) {
  expect_parity(with(3, ReduceMicroSteps::kEach), EveryBlocks::each());
  expect_parity(with(3, ReduceMicroSteps::kOnce), EveryBlocks::every(3));
}

TEST_P(CheckpointingProofTest, LateOperationsChangeNoBit) {
  RankOptions delayed;
  delayed.decorate = [](std::unique_ptr<comm::Communicator> inner) {
    return std::make_unique<DelayedCommunicator>(std::move(inner), std::chrono::milliseconds(2));
  };
  expect_parity(with(1), EveryBlocks::square_root(), delayed);
  expect_parity(with(2), EveryBlocks::each(), delayed);
}

INSTANTIATE_TEST_SUITE_P(RanksStages, CheckpointingProofTest,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(0, 1, 2, 3)));

// An operator that is made of others, and has more pages than a rank holds at once: some go within it.
struct CellImpl : torch::nn::Module {
  CellImpl() { cell = register_module("cell", torch::nn::LSTMCell(32, 32)); }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto run = [this](const torch::Tensor& in) { return std::get<0>(cell->forward(in)); };
    return checkpointing::checkpoint(run, x);
  }
  torch::nn::LSTMCell cell{nullptr};
};
TORCH_MODULE(Cell);

std::vector<torch::Tensor> trained_cell(const Options& options, bool writes) {
  std::vector<torch::Tensor> result;
  run_ranks(4, [&](comm::World& world) {
    at::set_num_threads(1);
    DistributedDataParallel<Cell> model(make_seeded<Cell>(), world, options);
    Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1));
    if (writes) {
      const torch::NoGradGuard no_grad;
      model->cell->weight_ih.mul_(1.5);
    }
    const auto x = torch::linspace(-1, 1, 64).view({2, 32}) * (1 + world.rank());
    model(x).square().mean().backward();
    optimizer.step();
    const auto state = full_state(model);
    if (world.rank() != 0) return;
    for (const auto& item : state) result.push_back(item.value());
  });
  return result;
}

TEST(PagesWithinARegionTest, ThatGoInTheMiddleOfAnOperatorAreNoWritesOfTheRegion) {
  for (const bool writes : {false, true}) {
    Options options;
    options.page_bytes = 4_KiB;
    options.stage = stage_of(0);
    const auto expected = trained_cell(options, writes);
    options.stage = Stage::kParameters;
    for (const int secondary : {0, 2}) {
      options.secondary_shard_within = secondary;
      EXPECT_TRUE(same_bits(expected, trained_cell(options, writes)))
          << (writes ? "after a write, " : "") << "secondary shards within " << secondary;
    }
  }
}

// A graph from before the step must not be repeated with the weights from after it: at stage 3 they
// are gathered anew, so nothing else would notice.
TEST_P(CheckpointingProofTest, BackwardOverARegionFromBeforeTheStepIsRefused) {
  const auto [ranks, stage] = GetParam();
  at::set_num_threads(1);
  run_ranks(ranks, [&, stage = stage](comm::World& world) {
    Options options;
    options.stage = stage_of(stage);
    options.page_bytes = 4_KiB;
    DistributedDataParallel<Mlp> model(make_seeded<Mlp>(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    const auto loss = [&] {
      const auto forward = [&](const torch::Tensor& x) { return model->forward(x); };
      return checkpointing::checkpoint(forward, torch::ones({2, 16})).square().sum();
    };
    const auto before = loss();
    loss().backward();
    optimizer.step();
    EXPECT_THAT(error_of([&] { before.backward(); }),
                ::testing::HasSubstr("that its function captured, such as a parameter, was changed "
                                     "in place after the region"));
  });
}

// ---- recompute of operators ----

// Running statistics, which rank 0 gives to the others. [batch, 32] -> [batch, 32]
struct NormsImpl : torch::nn::Module {
  NormsImpl() {
    for (int layer = 0; layer < 4; ++layer) {
      linears->push_back(torch::nn::Linear(32, 32));
      norms->push_back(torch::nn::BatchNorm1d(32));
    }
    register_module("linears", linears);
    register_module("norms", norms);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (size_t layer = 0; layer < linears->size(); ++layer) {
      x = linears[layer]->as<torch::nn::Linear>()->forward(x);
      x = torch::gelu(norms[layer]->as<torch::nn::BatchNorm1d>()->forward(x)).tanh();
    }
    return x;
  }
  torch::nn::ModuleList linears, norms;
};
TORCH_MODULE(Norms);

using checkpointing::RecomputeOptions;

struct NormsRun {
  std::vector<torch::Tensor> values;  // rank 0's parameters and buffers
  int64_t activation_peak_bytes = 0;
  int64_t offloaded_bytes = 0;
  std::vector<int64_t> replays;  // by rank
};

// Some steps on two ranks, each with batches of its own. Without options: without recompute.
NormsRun train_norms(int stage, const std::optional<RecomputeOptions>& recompute_options,
                     bool offloaded = false) {
  constexpr int kRanks = 2;
  at::set_num_threads(1);
  NormsRun run{.replays = std::vector<int64_t>(kRanks)};
  run_ranks(kRanks, [&](comm::World& world) {
    Options options;
    options.stage = stage_of(stage);
    options.page_bytes = 4_KiB;
    DistributedDataParallel<Norms> model(make_seeded<Norms>(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    auto recompute = zeropage::recompute(model, recompute_options.value_or(RecomputeOptions()));
    checkpointing::ActivationOffload offload;
    const int64_t replays = checkpointing::recompute_statistics().replays;
    memory::Ledger& ledger = *memory::Ledger::current();
    for (int step = 0; step < 5; ++step) {
      const auto x =
          torch::linspace(-1, 1, 64 * 32).view({64, 32}) * (1 + 0.1 * step + 0.3 * world.rank());
      if (step == 2) ledger.reset_peak();
      torch::Tensor loss;
      {
        std::optional<ActivationScope> scope;
        if (recompute_options) scope.emplace(recompute);
        std::optional<ActivationScope> leaving;
        if (offloaded) leaving.emplace(offload);
        loss = model(x.sin()).square().sum();
      }
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    run.replays[static_cast<size_t>(world.rank())] =
        checkpointing::recompute_statistics().replays - replays;
    const GatheredParameters whole(model);
    if (world.rank() != 0) return;
    run.activation_peak_bytes = ledger.activation_peak();
    run.offloaded_bytes = offload.statistics().host_total_bytes;
    for (const auto& parameter : model.parameters()) {
      run.values.push_back(parameter.detach().clone());
    }
    for (const auto& buffer : model.buffers()) run.values.push_back(buffer.clone());
  });
  return run;
}

TEST(RecomputeProofTest, BatchNormOnTwoRanksHasTheBitsOfTheRunWithoutRecompute) {
  for (const int stage : {0, 1, 2, 3}) {
    const NormsRun plain = train_norms(stage, {});
    RecomputeOptions selective = RecomputeOptions::selective();
    RecomputeOptions budget = RecomputeOptions::budget(plain.activation_peak_bytes * 9 / 10);
    selective.least_bytes = budget.least_bytes = 1024;
    for (const auto& [options, offloaded] : {std::pair(selective, false), std::pair(budget, false),
                                             std::pair(selective, true), std::pair(budget, true)}) {
      SCOPED_TRACE(c10::str("stage ", stage, options.budget_bytes ? ", budget" : ", selective",
                            offloaded ? ", what is kept leaves" : ""));
      const NormsRun recomputed = train_norms(stage, options, offloaded);
      EXPECT_GT(recomputed.replays[0], 0);
      EXPECT_EQ(recomputed.offloaded_bytes > 0, offloaded);
      EXPECT_EQ(recomputed.replays[0], recomputed.replays[1]);
      ASSERT_EQ(plain.values.size(), recomputed.values.size());
      for (size_t index = 0; index < plain.values.size(); ++index) {
        EXPECT_TRUE(torch::equal(plain.values[index], recomputed.values[index])) << index;
      }
    }
  }
}

// Each rank would measure for itself.
TEST(RecomputeProofTest, ABudgetWithoutAgreementIsRefusedWhereParametersAreSharded) {
  for (const int ranks : {1, 2}) {
    for (const int stage : {2, 3}) {
      run_ranks(ranks, [&](comm::World& world) {
        Options options;
        options.stage = stage_of(stage);
        DistributedDataParallel<Norms> model(make_seeded<Norms>(), world, options);
        const auto forward = [&](checkpointing::Recompute& recompute) {
          const ActivationScope scope(recompute);
          model(torch::ones({4, 32}));
        };
        checkpointing::Recompute alone(RecomputeOptions::budget(1 << 20));
        checkpointing::Recompute selective(RecomputeOptions::selective());
        auto shared = zeropage::recompute(model, RecomputeOptions::budget(1 << 20));
        const std::string refusal = error_of([&] { forward(alone); });
        if (stage == 3 && ranks > 1) {
          EXPECT_THAT(refusal, ::testing::HasSubstr("make it by zeropage::recompute(model, "
                                                    "options)"));
        } else {
          EXPECT_EQ(refusal, "");
        }
        forward(selective);
        forward(shared);
        const torch::NoGradGuard no_grad;
        forward(alone);
      });
    }
  }
}

// ---- pages ----

constexpr int64_t kWidth = 96;

// A block of one page.
struct PageBlockImpl : torch::nn::Module {
  PageBlockImpl() { linear = register_module("linear", torch::nn::Linear(kWidth, kWidth)); }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(linear(x));
    if (!look) return x;
    look();
    if (x.requires_grad()) x.register_hook([look = look](const torch::Tensor&) { look(); });
    return x;
  }
  torch::nn::Linear linear{nullptr};
  std::function<void()> look;
};
TORCH_MODULE(PageBlock);

// [batch, kWidth] -> [batch, kWidth]
struct PagesImpl : torch::nn::Module {
  explicit PagesImpl(int64_t count) {
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t block = 0; block < count; ++block) blocks->push_back(PageBlock());
  }
  torch::Tensor forward(torch::Tensor x) {
    return checkpointing::checkpoint_each<PageBlock>(blocks, every, std::move(x));
  }
  EveryBlocks every = EveryBlocks::none();
  torch::nn::ModuleList blocks{nullptr};
};
TORCH_MODULE(Pages);

Options of_one_page_a_block() {
  Options options;
  options.stage = Stage::kParameters;
  options.page_bytes = 40_KiB;
  return options;
}

// Gathers in the fourth step of two ranks.
struct Gathers {
  int64_t pages = 0;
  int64_t faults = 0;
  int64_t prefetched = 0;
};

Gathers gathers_of(int64_t blocks, EveryBlocks every) {
  at::set_num_threads(1);
  Gathers result;
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<Pages> model(Pages(blocks), world, of_one_page_a_block());
    model->every = every;
    Optimizer<AdamW> optimizer(model, AdamWOptions(1e-3));
    memory::PagingStatistics before, after;
    for (int step = 0; step < 4; ++step) {
      before = model.paging();
      model(torch::ones({2, kWidth}).requires_grad_()).square().sum().backward();
      optimizer.step();
      after = model.paging();
    }
    if (world.rank() != 0) return;
    const zero::ShardedModel& sharded = sharded_parameters_of(model);
    ASSERT_EQ(sharded.pages->layouts().size(), static_cast<size_t>(blocks));
    const memory::PagingStatistics step = after - before;
    result = {base::div_exact(step.bytes_gathered, sharded.paging->pager()->largest_page_bytes()),
              step.faults, step.prefetched};
  });
  return result;
}

// Two pages are resident at once, so of what runs forward and then backward, the last two stay.
TEST(CheckpointingPagesTest, RepetitionAndBackwardOfABlockShareOneGather) {
  for (const int64_t blocks : {4, 8, 12}) {
    EXPECT_EQ(gathers_of(blocks, EveryBlocks::none()).pages, 2 * blocks - 2);
    EXPECT_EQ(gathers_of(blocks, EveryBlocks::each()).pages, 2 * blocks - 2);
    EXPECT_EQ(gathers_of(blocks, EveryBlocks::every(2)).pages, 2 * blocks - 2);
  }
}

// Forward, repetition and backward: three gathers a page, but of the regions' last two in backward,
// and of the last region, which is not repeated.
TEST(CheckpointingPagesTest, APageIsGatheredAtMostOnceMoreForRegionsOfSeveralBlocks) {
  for (const int64_t blocks : {6, 12}) {
    const int64_t without = gathers_of(blocks, EveryBlocks::none()).pages;
    for (const int64_t each : {3, 6}) {
      const int64_t with = gathers_of(blocks, EveryBlocks::every(each)).pages;
      const int64_t regions = blocks / each;
      EXPECT_EQ(with, blocks + (regions - 1) * each + regions * (each - 2)) << each;
      EXPECT_LE(with, without + blocks);
    }
  }
}

TEST(CheckpointingPagesTest, TheTraceIsFollowedThroughRepetitions) {
  const int64_t faults = gathers_of(12, EveryBlocks::none()).faults;
  for (const auto& every : {EveryBlocks::each(), EveryBlocks::square_root()}) {
    const Gathers with = gathers_of(12, every);
    EXPECT_EQ(with.faults, faults);
    EXPECT_EQ(with.prefetched, with.pages - with.faults);
  }
}

// ---- memory ----

// The most that a rank holds of parameters, gradients and buckets beyond what persists.
int64_t transient_bytes(int64_t blocks, EveryBlocks every, int64_t* page_bytes) {
  int64_t highest = 0;
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<Pages> model(Pages(blocks), world, of_one_page_a_block());
    model->every = every;
    Optimizer<AdamW> optimizer(model, AdamWOptions(1e-3));
    memory::Ledger& ledger = *memory::Ledger::current();
    const auto of_parameters = [&] {
      const memory::Breakdown now = ledger.now();
      return now[Kind::kParameter] + now[Kind::kGradient] + now[Kind::kBucket] +
             now[Kind::kOptimizerState];
    };
    int64_t most = 0;
    for (int step = 0; step < 3; ++step) {
      const int64_t persistent = ledger.now().persistent();
      // Once the optimizer has its state.
      const auto look = [&] {
        if (step > 0) most = std::max(most, of_parameters() - persistent);
      };
      for (const auto& block : *model->blocks) block->as<PageBlock>()->look = look;
      model(torch::ones({2, kWidth}).requires_grad_()).square().sum().backward();
      look();
      optimizer.step();
    }
    if (world.rank() != 0) return;
    highest = most;
    *page_bytes = sharded_parameters_of(model).paging->pager()->largest_page_bytes();
  });
  return highest;
}

TEST(CheckpointingMemoryTest, StageThreeHoldsTwoPagesAndABucketWithRegionsAtAnyDepth) {
  int64_t page_bytes = 0;
  const int64_t without = transient_bytes(4, EveryBlocks::none(), &page_bytes);
  EXPECT_GT(without, page_bytes) << "it looked at the wrong moments";
  for (const int64_t blocks : {4, 16}) {
    for (const auto& every : {EveryBlocks::each(), EveryBlocks::square_root()}) {
      const int64_t with = transient_bytes(blocks, every, &page_bytes);
      EXPECT_GT(with, page_bytes);
      EXPECT_LE(with, 3 * page_bytes) << blocks << " blocks";
    }
  }
}

}  // namespace
}  // namespace zeropage::checkpointing_test

// Formula-exact memory: what persists on a rank is ZeRO's formula, by the ledger.
#include <barrier>

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/testing.h"
#include "zeropage/zeropage.h"

namespace zeropage::memory_formula_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;

constexpr int64_t kWidth = 700;

torch::nn::Sequential make_deep(int layers) {
  torch::nn::Sequential net;
  net->push_back(torch::nn::Linear(7, kWidth));
  for (int layer = 0; layer < layers; ++layer) {
    net->push_back(torch::nn::Linear(kWidth, kWidth));
    net->push_back(torch::nn::Tanh());
  }
  net->push_back(torch::nn::Linear(kWidth, 7));
  return net;
}

void train(DistributedDataParallel<torch::nn::Sequential>& model,
           torch::optim::Optimizer& optimizer, int rank) {
  for (int step = 0; step < 2; ++step) {
    const Samples samples = samples_of(rank, step);
    optimizer.zero_grad();
    loss_of(model(samples.inputs), samples).backward();
    optimizer.step();
  }
}

// A world's segments in shared memory are on the ledgers, and not the allocator's.
TEST(MemoryExpectationsTest, LedgersEqualTheAllocatorInAWorldOfTwo) {
  std::barrier<> quiet(2);
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Sequential> model(make_deep(1), world);
    Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));
    train(model, optimizer, world.rank());
    quiet.arrive_and_wait();
    if (world.rank() == 0) {
      EXPECT_GT(memory::host_bytes_charged_by_hand(), 0);
      EXPECT_LEDGERS_EQUAL_ALLOCATOR();
    }
    quiet.arrive_and_wait();
  });
}

TEST(MemoryExpectationsTest, TheDocumentedOneSeesWhatAStepAllocates) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Sequential> model(make_deep(1), world);
    Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));
    memory::Ledger& ledger = *memory::Ledger::current();
    ledger.reset_peak();
    const int64_t before = ledger.now().total();
    train(model, optimizer, world.rank());
    EXPECT_NONFATAL_FAILURE(EXPECT_PEAK_BYTES_LE(ledger, before + 1024), "expected at most");
    EXPECT_PEAK_BYTES_LE(ledger, before + 64 * 1024 * 1024);
  });
}

class MemoryFormulaTest : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(MemoryFormulaTest, PersistentBytesAreTheFormula) {
  const auto [ranks, stage] = GetParam();
  run_ranks(ranks, [&, ranks = ranks, stage = stage](comm::World& world) {
    Options options;
    options.stage = stage_of(stage);
    options.page_bytes = memory::operator""_MiB(4);
    DistributedDataParallel<torch::nn::Sequential> model(make_deep(6), world, options);
    Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));
    train(model, optimizer, world.rank());
    int64_t numel = 0;
    for (const auto& parameter : model.parameters()) numel += parameter.numel();
    const double bytes = 4.0 * static_cast<double>(numel);
    // p.grad() is there until zero_grad().
    const memory::Breakdown held = memory::Ledger::current()->now();
    const auto share = [&](int sharded_from) { return stage >= sharded_from ? 1.0 / ranks : 1.0; };
    const auto expect_about = [&](Kind kind, double expected) {
      EXPECT_NEAR(static_cast<double>(held[kind]), expected, 0.005 * expected)
          << memory::name(kind) << " of " << memory::to_text(held);
    };
    expect_about(Kind::kParameter, bytes * share(3));
    expect_about(Kind::kGradient, bytes * share(2));
    // A rank whose shards end in padding holds a little less state.
    EXPECT_LE(static_cast<double>(held[Kind::kOptimizerState]), 1.005 * 2 * bytes * share(1))
        << memory::to_text(held);
    EXPECT_GE(static_cast<double>(held[Kind::kOptimizerState]), 0.95 * 2 * bytes * share(1))
        << memory::to_text(held);
    EXPECT_LE(static_cast<double>(held.persistent()),
              1.005 * bytes * (share(3) + share(2) + 2 * share(1)));
    EXPECT_EQ(held[Kind::kBucket], 0);
    optimizer.zero_grad();
    memory::Breakdown without_gradients = held;
    without_gradients[Kind::kGradient] = 0;
    EXPECT_EQ(memory::to_text(memory::Ledger::current()->now()),
              memory::to_text(without_gradients));
  });
}

INSTANTIATE_TEST_SUITE_P(RanksStages, MemoryFormulaTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 8),
                                            ::testing::Values(0, 1, 2, 3)));

// What a step holds of parameters, gradients and buckets beyond what persists, at its highest.
int64_t transient_bytes(int layers, int64_t* page_bytes) {
  int64_t highest = 0;
  run_ranks(2, [&](comm::World& world) {
    Options options;
    options.stage = Stage::kParameters;
    options.page_bytes = memory::operator""_MiB(2);
    DistributedDataParallel<torch::nn::Sequential> model(make_deep(layers), world, options);
    Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));
    train(model, optimizer, world.rank());
    memory::Ledger& ledger = *memory::Ledger::current();
    const int64_t persistent = ledger.now().persistent();
    int64_t own = 0;
    const auto look = [&] {
      const memory::Breakdown now = ledger.now();
      own = std::max(own, now[Kind::kParameter] + now[Kind::kGradient] + now[Kind::kBucket] +
                              now[Kind::kOptimizerState] - persistent);
    };
    const Samples samples = samples_of(world.rank(), 0);
    auto x = samples.inputs;
    // Looks in the middle of forward and of backward.
    for (auto& layer : *model.module()) {
      x = layer.forward(x);
      look();
      x.register_hook([&](const torch::Tensor&) { look(); });
    }
    loss_of(x, samples).backward();
    look();
    optimizer.step();
    look();
    if (world.rank() != 0) return;
    highest = own;
    *page_bytes = sharded_parameters_of(model).paging->pager()->largest_page_bytes();
  });
  return highest;
}

TEST(MemoryFormulaTest, StageThreeHoldsTwoPagesAndABucketAtAnyDepth) {
  int64_t page_bytes = 0;
  const int64_t shallow = transient_bytes(4, &page_bytes);
  EXPECT_GT(shallow, page_bytes) << "it looked at the wrong moments";
  EXPECT_LE(shallow, 3 * page_bytes);
  EXPECT_EQ(transient_bytes(16, &page_bytes), shallow);
}

TEST(MemoryFormulaTest, WrappingAModuleNeedsNoSecondCopyOfIt) {
  run_ranks(2, [](comm::World& world) {
    auto net = make_deep(12);
    memory::Ledger& ledger = *memory::Ledger::current();
    const int64_t before = ledger.now().total();
    ledger.reset_peak();
    Options options;
    options.page_bytes = memory::operator""_MiB(4);
    const zero::PageParts parts =
        zero::make_pages(world, zero::parameters_of(*net),
                         {.pages = {.page_bytes = options.page_bytes, .sharding = options}});
    EXPECT_PEAK_BYTES_LE(ledger, before + 2 * options.page_bytes);
  });
}

TEST(MemoryFormulaTest, ShardingAModuleNeedsAPageMoreThanItAndLeavesItsShare) {
  run_ranks(2, [](comm::World& world) {
    auto net = make_deep(12);
    memory::Ledger& ledger = *memory::Ledger::current();
    const int64_t before = ledger.now().total();
    ledger.reset_peak();
    const int64_t page_bytes = memory::operator""_MiB(4);
    const zero::PageParts parts = zero::make_pages(
        world, zero::parameters_of(*net),
        {.pages = {.page_bytes = page_bytes, .sharding = {.stage = Stage::kParameters}}});
    EXPECT_PEAK_BYTES_LE(ledger, before + 2 * page_bytes);
    EXPECT_LE(ledger.now()[Kind::kParameter] * 2, before * 1.005);
  });
}

TEST(MemoryFormulaTest, EveryByteIsGoneWhenTheModelIs) {
  run_ranks(2, [](comm::World& world) {
    // The communicator keeps its staging segments.
    const auto without_staging = [](const memory::Breakdown& bytes) {
      return bytes.total() - bytes[Kind::kStaging];
    };
    const int64_t before = without_staging(memory::Ledger::current()->now());
    {
      DistributedDataParallel<torch::nn::Sequential> model(make_deep(3), world);
      Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));
      train(model, optimizer, world.rank());
    }
    const memory::Breakdown left = memory::Ledger::current()->now();
    EXPECT_EQ(without_staging(left), before) << memory::to_text(left);
  });
}

}  // namespace
}  // namespace zeropage::memory_formula_test

// What is Adafactor's own among the optimizers of whole tensors (tensor_passes_test.cpp): states that are not of their parameter's
// shape, of which every rank with a part has all.
#include "zero/update/factored_update.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/state_files.h"
#include "zeropage/saved_state.h"
#include "zeropage/zeropage.h"

namespace zeropage::factored_update_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using memory::Tier;
using ::testing::HasSubstr;
using memory::operator""_KiB;

constexpr int64_t kRows = 48;
constexpr int64_t kColumns = 64;

torch::Tensor numbers(torch::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, at::detail::createCPUGenerator(seed));
}

// A matrix, a vector, a batch of matrices, and a matrix that is used when it is asked for.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    matrix = register_parameter("matrix", numbers({kRows, kColumns}, 1));
    vector = register_parameter("vector", numbers({kColumns}, 2));
    batch = register_parameter("batch", numbers({3, kColumns, 8}, 3));
    late = register_parameter("late", numbers({8, 5}, 4));
  }
  // x: [n, kRows]
  torch::Tensor forward(const torch::Tensor& x, bool uses_late = true) {
    const torch::Tensor hidden = torch::tanh(x.matmul(matrix) + vector);
    torch::Tensor out = hidden.matmul(batch.sum(0));
    if (uses_late) out = torch::cat({out, out.matmul(late)}, 1);
    return out.square().mean();
  }
  torch::Tensor matrix, vector, batch, late;
};
TORCH_MODULE(Net);

torch::Tensor samples(int step) {
  return numbers({5, kRows}, 100 + static_cast<uint64_t>(step));
}

// A page a parameter, or more, so that with several ranks each has a part.
Options options_of(int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;
  return options;
}

void step(DistributedDataParallel<Net>& model, ShardedOptimizer& optimizer, int count,
          bool uses_late = true) {
  optimizer.zero_grad();
  model(samples(count), uses_late).backward();
  optimizer.step();
}

std::vector<torch::Tensor> values_of(DistributedDataParallel<Net>& model) {
  std::vector<torch::Tensor> values;
  for (const auto& item : full_state(model)) values.push_back(item.value().clone());
  return values;
}

// 4 bytes for each row and column of a matrix of which the rank has a part, and for each of its elements of vectors.
TEST(FactoredUpdateTest, HoldsTheFormulasBytes) {
  for (const int stage : {0, 1, 3}) {
    run_ranks(2, [&](comm::World& world) {
      Net net;
      DistributedDataParallel<Net> model(net, world, options_of(stage));
      memory::Ledger& ledger = *memory::Ledger::current();
      const int64_t before = ledger.now()[Kind::kOptimizerState];
      Optimizer<Adafactor> optimizer(model);
      int64_t numel = 0;
      visit_owned_shards(model, [&](const OwnedShard& shard) {
        if (shard.range.empty()) return;
        const at::Tensor parameter = net->named_parameters()[shard.name];
        if (parameter.dim() == 1) {
          numel += shard.range.numel();
        } else {
          numel += parameter.numel() / parameter.size(-1) + parameter.numel() / parameter.size(-2);
        }
      });
      EXPECT_EQ(ledger.now()[Kind::kOptimizerState] - before, 4 * numel) << stage;
    });
  }
}

// Two all-reduces, of 4 and of 8 bytes for each row and column, and one of the two norms of each parameter. So few bytes go from
// each rank to each other.
TEST(FactoredUpdateTest, SendsTheFormulasBytes) {
  for (const int ranks : {2, 4}) {
    run_ranks(ranks, [&](comm::World& world) {
      Net net;
      DistributedDataParallel<Net> model(net, world, options_of(3));
      Optimizer<Adafactor> optimizer(model);
      model(samples(0)).backward();
      const int64_t before = world.communicator().wire_traffic().all_reduce.bytes;
      optimizer.step();
      const at::Tensor sent =
          torch::tensor({world.communicator().wire_traffic().all_reduce.bytes - before});
      world.communicator().all_reduce(sent, comm::ReduceOp::kSum, "the bytes of a test").wait();
      constexpr int64_t kSums = (kRows + kColumns) + 3 * (kColumns + 8) + (8 + 5);
      const int64_t payload = 12 * kSums + 4 * 1104;
      // What other parts of a step send is some tens of bytes.
      EXPECT_NEAR(static_cast<double>(sent.item<int64_t>()),
                  static_cast<double>(ranks * (ranks - 1) * payload), 2000);
    });
  }
}

std::string saved(const DiskFolder& folder, const std::string& name, int ranks, int stage) {
  const std::string path = folder.path() + "/" + name;
  run_ranks(ranks, [&](comm::World& world) {
    Net net;
    DistributedDataParallel<Net> model(net, world, options_of(stage));
    Optimizer<Adafactor> optimizer(model);
    for (int count = 0; count < 3; ++count) step(model, optimizer, count);
    save_state(path, model, optimizer);
  });
  return path;
}

TEST(FactoredUpdateTest, IsSavedUnderPyTorchsNamesAndShapesWhateverItWasShardedOver) {
  const DiskFolder folder;
  const std::string whole = saved(folder, "whole", 1, 0);
  expect_same_files(whole, saved(folder, "sharded", 4, 3));
  expect_same_files(whole, saved(folder, "stage-1", 2, 1));
  const state::SavedState opened(whole);
  const state::TensorFile& file = *opened.optimizer();
  using Shape = std::vector<uint64_t>;
  EXPECT_EQ(file.find("matrix:row_var")->shape, (Shape{kRows, 1}));
  EXPECT_EQ(file.find("matrix:col_var")->shape, (Shape{1, kColumns}));
  EXPECT_EQ(file.find("batch:row_var")->shape, (Shape{3, kColumns, 1}));
  EXPECT_EQ(file.find("batch:col_var")->shape, (Shape{3, 1, 8}));
  EXPECT_EQ(file.find("vector:variance")->shape, (Shape{kColumns}));
  EXPECT_EQ(file.find("vector:row_var"), nullptr);
}

TEST(FactoredUpdateTest, TheStateOfAnotherOptimizerOrModelIsRefused) {
  const DiskFolder folder;
  const std::string path = saved(folder, "state", 2, 3);
  run_ranks(2, [&](comm::World& world) {
    Net net;
    DistributedDataParallel<Net> model(net, world, options_of(3));
    Optimizer<torch::optim::AdamW> adamw(model);
    EXPECT_THAT(error_of([&] { load_state(path, model, adamw); }),
                HasSubstr("expected the state of torch::optim::AdamW, got that of "
                          "zeropage::Adafactor"));
    Optimizer<Adafactor> optimizer(model);
    EXPECT_EQ(error_of([&] { load_state(path, model, optimizer); }), "");
  });
}

// The weight `late` is frozen, then trained for a step, with a load in between.
TEST(FactoredUpdateTest, AParameterThatIsUnfrozenGetsItsMomentsThen) {
  const DiskFolder folder;
  std::vector<std::vector<torch::Tensor>> results;
  for (const int ranks : {1, 4}) {
    for (const bool reloads : {false, true}) {
      const std::string path = folder.path() + "/" + std::to_string(ranks) + (reloads ? "r" : "");
      run_ranks(ranks, [&](comm::World& world) {
        Net net;
        net->late.requires_grad_(false);
        DistributedDataParallel<Net> model(net, world, options_of(ranks == 1 ? 0 : 3));
        Optimizer<Adafactor> optimizer(model);
        step(model, optimizer, 0);
        if (reloads) {
          save_state(path, model, optimizer);
          load_state(path, model, optimizer);
        }
        net->late.requires_grad_(true);
        for (int count = 1; count < 3; ++count) step(model, optimizer, count);
        if (reloads) {
          save_state(path, model, optimizer);
          load_state(path, model, optimizer);
        }
        step(model, optimizer, 3);
        auto values = values_of(model);
        if (world.rank() == 0) results.push_back(std::move(values));
      });
    }
  }
  for (const auto& result : results) EXPECT_TRUE(same_bits(results.front(), result));
}

TEST(FactoredUpdateTest, AParameterThatIsNotContiguousIsRefused) {
  struct Transposed : torch::nn::Module {
    Transposed() { weight = register_parameter("weight", torch::randn({4, 6}).t()); }
    torch::Tensor weight;
  };
  run_ranks(1, [](comm::World& world) {
    auto module = std::make_shared<Transposed>();
    DistributedDataParallel<torch::nn::ModuleHolder<Transposed>> model(
        torch::nn::ModuleHolder<Transposed>(module), world);
    EXPECT_THAT(
        error_of([&] { Optimizer<Adafactor> optimizer(model); }),
        HasSubstr(
            "parameter \"weight\" of sizes [6, 4] and strides [1, 6]: expected a contiguous"));
  });
}

// One rank's gradient is too large for fp16.
TEST(FactoredUpdateTest, ASkippedStepLeavesMomentsAsTheyAre) {
  std::vector<std::vector<torch::Tensor>> results;
  for (const bool overflows : {false, true}) {
    run_ranks(2, [&](comm::World& world) {
      Net net;
      Options options = options_of(3);
      options.compute_dtype = torch::kHalf;
      DistributedDataParallel<Net> model(net, world, options);
      Optimizer<Adafactor> optimizer(model);
      Accumulator accumulator(model, {.loss_scaler = accumulate::LossScalerOptions::fixed(64)});
      for (int count = 0; count < 4; ++count) {
        if (count == 2 && overflows) {
          accumulator.backward(model(samples(9).to(torch::kHalf)).to(torch::kFloat) * 1e30);
          EXPECT_EQ(accumulator.step(optimizer).skipped, Skipped::kNotFinite);
        }
        accumulator.backward(model(samples(count).to(torch::kHalf)).to(torch::kFloat));
        accumulator.step(optimizer);
      }
      auto values = values_of(model);
      if (world.rank() == 0) results.push_back(std::move(values));
    });
  }
  EXPECT_TRUE(same_bits(results[0], results[1]));
}

}  // namespace
}  // namespace zeropage::factored_update_test

// Optimizer states that are smaller than fp32, and master weights as remainders of the parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "optim/split_values.h"
#include "tests/harness/errors.h"
#include "tests/harness/mixed_precision_reference.h"
#include "tests/harness/ranks.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/testing.h"
#include "zeropage/zeropage.h"

namespace zeropage::optimizer_state_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using memory::operator""_KiB;
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int kSteps = 3;

// Weights that begin within a block, two in a page, and biases that keep fp32 states.
struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl() {
    first = register_module("first", torch::nn::Linear(70, 97));
    skipped = register_module("skipped", torch::nn::Linear(97, 97));
    last = register_module("last", torch::nn::Linear(97, 70));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(first(x))); }

  torch::nn::Linear first{nullptr}, skipped{nullptr}, last{nullptr};
};
TORCH_MODULE(TwoLayers);

Options options_with(StateFormat format, int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 64_KiB;
  options.optimizer_state = format;
  options.rounding_seed = 9;
  return options;
}

// All ranks have the same samples: for a power of two of them the mean has the gradient's bits.
void train_step(DistributedDataParallel<TwoLayers>& model, torch::optim::Optimizer& optimizer,
                int step, torch::ScalarType dtype = torch::kFloat) {
  const auto samples =
      torch::randn({4, 70}, at::detail::createCPUGenerator(static_cast<uint64_t>(step))).to(dtype);
  optimizer.zero_grad();
  auto loss = (model(samples) - samples).square().mean();
  // Has a gradient in the second step alone: its states are younger, and begin within a page.
  if (step == 1) loss = loss + 1e-3 * model->skipped->weight.square().sum();
  loss.backward();
  optimizer.step();
}

std::vector<torch::Tensor> train(int ranks, const Options& options) {
  std::vector<torch::Tensor> result;
  run_ranks(ranks, [&](comm::World& world) {
    DistributedDataParallel<TwoLayers> model(make<TwoLayers>(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    for (int step = 0; step < kSteps; ++step) {
      train_step(model, optimizer, step, options.compute_dtype.value_or(torch::kFloat));
    }
    const auto state = full_state(model);
    if (world.rank() != 0) return;
    for (const auto& item : state) result.push_back(item.value());
  });
  return result;
}

void expect_the_same_bits_everywhere(const std::function<Options(int stage)>& options) {
  const auto expected = train(1, options(0));
  for (const int ranks : {1, 2, 4}) {
    for (const int stage : {0, 1, 2, 3}) {
      EXPECT_TRUE(same_bits(expected, train(ranks, options(stage))))
          << "stage " << stage << ", " << ranks << " ranks";
    }
  }
}

TEST(OptimizerStateTest, InBf16HasTheSameBitsForAnyRanksAndStage) {
  expect_the_same_bits_everywhere(
      [](int stage) { return options_with(StateFormat::kBf16, stage); });
}

TEST(OptimizerStateTest, In8BitsHasTheSameBitsForAnyRanksAndStage) {
  expect_the_same_bits_everywhere(
      [](int stage) { return options_with(StateFormat::k8Bit, stage); });
}

TEST(OptimizerStateTest, BesideSplitOrRoundedParametersHasTheSameBitsForAnyRanksAndStage) {
  for (const auto update :
       {LowPrecisionUpdate::kSplitMasterWeights, LowPrecisionUpdate::kStochasticRounding}) {
    expect_the_same_bits_everywhere([&](int stage) {
      Options options = options_with(StateFormat::k8Bit, stage);
      options.compute_dtype = torch::kBFloat16;
      options.low_precision_update = update;
      return options;
    });
  }
}

TEST(OptimizerStateTest, IsWhatChangesTheBits) {
  const auto fp32 = train(1, options_with(StateFormat::kFp32, 1));
  const auto bf16 = train(1, options_with(StateFormat::kBf16, 1));
  const auto in_8_bits = train(1, options_with(StateFormat::k8Bit, 1));
  EXPECT_FALSE(same_bits(fp32, bf16));
  EXPECT_FALSE(same_bits(fp32, in_8_bits));
  Options reseeded = options_with(StateFormat::kBf16, 1);
  reseeded.rounding_seed = 10;
  EXPECT_FALSE(same_bits(bf16, train(1, reseeded)));
}

TEST(OptimizerStateTest, OfLargeParametersTakesTheBytesThatAreWritten) {
  const auto bytes_of = [](StateFormat format) {
    int64_t bytes = 0;
    run_ranks(1, [&](comm::World& world) {
      Options options = options_with(format, 1);
      options.page_bytes = Options::kPageBytesOfDevice;
      DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(512, 1024), world,
                                                       options);
      Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
      model(torch::randn({2, 512})).sum().backward();
      optimizer.step();
      bytes = memory::Ledger::current()->now()[Kind::kOptimizerState];
    });
    return static_cast<double>(bytes) / (512 * 1024 + 1024);
  };
  EXPECT_NEAR(bytes_of(StateFormat::kFp32), 8, 0.01);
  EXPECT_NEAR(bytes_of(StateFormat::kBf16), 4, 0.01);
  EXPECT_LE(bytes_of(StateFormat::k8Bit), 2.1);
}

TEST(OptimizerStateTest, IsRefusedWhereTheUpdateIsNotFused) {
  run_ranks(1, [](comm::World& world) {
    const Options in_8_bits = options_with(StateFormat::k8Bit, 1);
    DistributedDataParallel<TwoLayers> model(make<TwoLayers>(), world, in_8_bits);
    EXPECT_THAT(error_of([&] { Optimizer<torch::optim::RMSprop> optimizer(model); }),
                HasSubstr("RMSprop has no fused form"));
    Options by_class = in_8_bits;
    by_class.update_by = UpdateBy::kClass;
    EXPECT_THAT(error_of([&] { validate(by_class); }), HasSubstr("options.optimizer_state"));
    by_class.optimizer_state = StateFormat::kFp32;
    by_class.low_precision_update = LowPrecisionUpdate::kSplitMasterWeights;
    EXPECT_THAT(error_of([&] { validate(by_class); }), HasSubstr("kSplitMasterWeights"));
    Options half;
    half.low_precision_update = LowPrecisionUpdate::kSplitMasterWeights;
    half.compute_dtype = torch::kHalf;
    EXPECT_THAT(error_of([&] { validate(half); }), HasSubstr("is for bfloat16"));
  });
}

// The same bf16 gradients for all kinds of master weights, which rounded parameters would not give.
void step_with_drawn_gradients(DistributedDataParallel<TwoLayers>& model,
                               torch::optim::Optimizer& optimizer, int step) {
  optimizer.zero_grad();
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
  torch::Tensor loss = torch::zeros({}, torch::kBFloat16);
  for (const auto& parameter : model.parameters()) {
    const auto weights = torch::randn(parameter.sizes(), generator).to(torch::kBFloat16);
    loss = loss + (parameter * weights).sum();
  }
  loss.backward();
  optimizer.step();
}

// The fp32 master weights after some steps, by page.
std::vector<torch::Tensor> masters_after_steps(LowPrecisionUpdate update, int stage) {
  std::vector<torch::Tensor> masters;
  run_ranks(2, [&](comm::World& world) {
    Options options = options_with(StateFormat::kFp32, stage);
    options.update_by = UpdateBy::kFused;
    options.compute_dtype = torch::kBFloat16;
    options.low_precision_update = update;
    DistributedDataParallel<TwoLayers> model(make<TwoLayers>(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    for (int step = 0; step < 4; ++step) step_with_drawn_gradients(model, optimizer, step);
    if (world.rank() != 0) return;
    const zero::ShardedModel& sharded = sharded_parameters_of(model);
    for (size_t page = 0; page < sharded.pages->layouts().size(); ++page) {
      const at::Tensor& remainders = sharded.masters->remainders(page);
      masters.push_back(remainders.defined()
                            ? optim::joined_values(sharded.memory->owned(page), remainders)
                            : sharded.masters->copy(page).clone());
    }
  });
  return masters;
}

TEST(SplitMasterWeightsTest, HaveTheBitsOfMasterWeightsInFp32) {
  for (const int stage : {0, 1, 2, 3}) {
    EXPECT_TRUE(same_bits(masters_after_steps(LowPrecisionUpdate::kMasterWeights, stage),
                          masters_after_steps(LowPrecisionUpdate::kSplitMasterWeights, stage)))
        << "stage " << stage;
  }
}

TEST(SplitMasterWeightsTest, CostTwoBytesForEachElementThatThisRankOwns) {
  run_ranks(2, [](comm::World& world) {
    Options options = options_with(StateFormat::kFp32, 2);
    options.compute_dtype = torch::kBFloat16;
    options.low_precision_update = LowPrecisionUpdate::kSplitMasterWeights;
    DistributedDataParallel<TwoLayers> model(make<TwoLayers>(), world, options);
    const zero::ParameterPages& pages = *sharded_parameters_of(model).pages;
    int64_t expected = 0;
    for (size_t page = 0; page < pages.layouts().size(); ++page) {
      expected += 2 * pages.owned(page).numel();
    }
    EXPECT_KIND_BYTES_EQ(*memory::Ledger::current(), Kind::kMasterWeights, expected);
    const memory::TierBytes planned = pages.plan().held(/*states=*/2);
    EXPECT_EQ(planned[memory::Tier::kDevice][Kind::kMasterWeights], expected);
  });
}

TEST(SplitMasterWeightsTest, KeepSmallUpdatesAlsoWhereAnOperatorWritesTheParametersEveryStep) {
  for (const int stage : {1, 3}) {
    run_ranks(2, [&](comm::World& world) {
      Options options = options_with(StateFormat::kFp32, stage);
      options.compute_dtype = torch::kBFloat16;
      options.low_precision_update = LowPrecisionUpdate::kSplitMasterWeights;
      torch::nn::Linear linear(70, 97);
      torch::nn::init::ones_(linear->weight);
      DistributedDataParallel<torch::nn::Linear> model(linear, world, options);
      Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(1.0 / 2048));
      const auto write = [&](const auto& change) {
        const torch::NoGradGuard no_grad;
        change(model->weight);
      };
      const auto expect_weight_after = [&](int steps, double expected) {
        for (int step = 0; step < steps; ++step) {
          optimizer.zero_grad();
          model->weight.sum().backward();
          optimizer.step();
          write([](torch::Tensor& weight) { weight.clamp_(-4, 4); });
        }
        EXPECT_TRUE(model->weight.eq(expected).all().item<bool>()) << model->weight[0][0];
      };
      expect_weight_after(1, 1);  // 1 - 2^-11 rounds to 1
      expect_weight_after(7, 1 - 8.0 / 2048);
      // The lower bits are 0 now, and stay: they are less than half of the last bit of any number.
      write([](torch::Tensor& weight) { weight.fill_(4); });
      expect_weight_after(64, 4 - 64.0 / 2048);
    });
  }
}

}  // namespace
}  // namespace zeropage::optimizer_state_test

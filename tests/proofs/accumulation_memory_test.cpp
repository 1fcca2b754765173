// What an accumulation holds and sends: the bytes of zeropage/accumulator.h and zeropage/options.h, by the
// ledger and by the communicator's count.
#include <iostream>

#include <gtest/gtest.h>

#include "tests/harness/accumulated.h"
#include "tests/harness/ranks.h"
#include "tests/harness/square_layers.h"
#include "zeropage/testing.h"

namespace zeropage::accumulation_memory_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using memory::operator""_KiB;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr int kLayers = 6;
constexpr int64_t kWidth = 256;
constexpr int64_t kLayerNumel = kWidth * kWidth;
constexpr int64_t kNumel = kLayers * kLayerNumel;
constexpr int kMicroSteps = 8;

torch::nn::Sequential make_layers() {
  return testing::square_layers(kLayers, kWidth);
}

// The most that was seen of each kind.
struct Most {
  int64_t gradient = 0;
  int64_t bucket = 0;
};

struct Usage {
  Most in_backwards;
  int64_t gradient_before_step = 0;
  int64_t gradient_after_step = 0;
  int64_t reduce_scattered = 0;  // bytes of payload a rank sent in one step
  int64_t all_reduced = 0;
  int64_t sent = 0;  // by any operation
  int64_t peak = 0;  // of all kinds
};

int64_t held(Kind kind) {
  return memory::Ledger::current()->now()[kind];
}

int64_t all_bytes(const comm::WireTraffic& traffic) {
  return traffic.all_gather.bytes + traffic.reduce_scatter.bytes + traffic.all_reduce.bytes +
         traffic.broadcast.bytes + traffic.pair.bytes + traffic.reduce.bytes;
}

// Usage of the second of two steps, on rank 0.
Usage usage(int ranks, Options options, const AccumulatorOptions& accumulation) {
  options.page_bytes = 256_KiB;  // a layer in fp32
  Usage result;
  run_ranks(ranks, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Sequential> model(make_layers(), world, options);
    Optimizer<SGD> optimizer(model, SGDOptions(1e-6));
    Accumulator accumulator(model, accumulation);
    const auto inputs =
        torch::full({2, kWidth}, 1e-3).to(options.compute_dtype.value_or(torch::kFloat));
    Usage own;
    const auto look = [&] {
      own.in_backwards.gradient = std::max(own.in_backwards.gradient, held(Kind::kGradient));
      own.in_backwards.bucket = std::max(own.in_backwards.bucket, held(Kind::kBucket));
    };
    for (int step = 0; step < 2; ++step) {
      own = {};
      memory::Ledger::current()->reset_peak();
      const comm::WireTraffic before = world.communicator().wire_traffic();
      for (int64_t micro = 0; micro < accumulation.micro_steps; ++micro) {
        auto x = inputs;
        for (auto& layer : *model.module()) {
          x = layer.forward(x);
          look();
          x.register_hook([&](const torch::Tensor&) { look(); });
        }
        accumulator.backward(x.sum());
        look();
      }
      own.gradient_before_step = held(Kind::kGradient);
      const StepReport report = accumulator.step(optimizer);
      EXPECT_TRUE(report.stepped()) << report.to_string();
      own.gradient_after_step = held(Kind::kGradient);
      EXPECT_EQ(held(Kind::kBucket), 0);
      const comm::WireTraffic after = world.communicator().wire_traffic();
      own.reduce_scattered = after.reduce_scatter.bytes - before.reduce_scatter.bytes;
      own.all_reduced = after.all_reduce.bytes - before.all_reduce.bytes;
      own.sent = all_bytes(after) - all_bytes(before);
      own.peak = memory::Ledger::current()->at_peak(c10::kCPU).total();
    }
    if (world.rank() == 0) result = own;
  });
  return result;
}

Usage usage_at(int stage, int ranks, ReduceMicroSteps reduce, int micro_steps = kMicroSteps) {
  Options options;
  options.stage = stage_of(stage);
  return usage(ranks, options, {.micro_steps = micro_steps, .reduce = reduce});
}

class AccumulationMemoryTest : public ::testing::TestWithParam<int> {
 protected:
  int ranks() const { return GetParam(); }
  int64_t whole_bytes() const { return 4 * kNumel; }
  int64_t owned_bytes() const { return 4 * kNumel / ranks(); }
};

TEST_P(AccumulationMemoryTest, ReducedEachHoldsShardsAndAPageAtStagesTwoAndThree) {
  for (const int stage : {2, 3}) {
    const Usage used = usage_at(stage, ranks(), ReduceMicroSteps::kEach);
    EXPECT_EQ(used.in_backwards.gradient, owned_bytes());
    EXPECT_EQ(used.in_backwards.bucket, 256_KiB);
    EXPECT_EQ(used.gradient_after_step, 0);
  }
}

TEST_P(AccumulationMemoryTest, ReducedOnceHoldsWholeGradientsTooAtStagesTwoAndThree) {
  for (const int stage : {2, 3}) {
    const Usage used = usage_at(stage, ranks(), ReduceMicroSteps::kOnce);
    EXPECT_EQ(used.in_backwards.gradient, owned_bytes());
    EXPECT_EQ(used.in_backwards.bucket, whole_bytes());
    EXPECT_EQ(used.gradient_after_step, 0);
  }
}

TEST_P(AccumulationMemoryTest, ReducedEachCostsTheOwnedPartOnceMoreAtStagesZeroAndOne) {
  for (const int stage : {0, 1}) {
    const int64_t owned = stage == 0 ? whole_bytes() : owned_bytes();
    const Usage used = usage_at(stage, ranks(), ReduceMicroSteps::kEach);
    EXPECT_LE(used.in_backwards.gradient, whole_bytes() + owned) << "stage " << stage;
    // The page that is reduced last is no longer seen.
    EXPECT_EQ(used.in_backwards.gradient, whole_bytes() + owned / kLayers * (kLayers - 1));
    EXPECT_EQ(used.in_backwards.bucket, 0);
    EXPECT_EQ(used.gradient_after_step, 0);
  }
}

TEST_P(AccumulationMemoryTest, ReducedOnceCostsNothingMoreAtStagesZeroAndOne) {
  for (const int stage : {0, 1}) {
    const Usage used = usage_at(stage, ranks(), ReduceMicroSteps::kOnce);
    EXPECT_EQ(used.in_backwards.gradient, whole_bytes()) << "stage " << stage;
    EXPECT_EQ(used.in_backwards.bucket, 0);
  }
}

TEST_P(AccumulationMemoryTest, ATreeOverMicroStepsSetsAsideALogarithmOfThem) {
  Options options;
  options.world_invariant = true;
  for (const int stage : {0, 2}) {
    options.stage = stage_of(stage);
    const int64_t owned = stage == 0 ? whole_bytes() : owned_bytes();
    const int64_t kept = stage == 0 ? whole_bytes() : owned_bytes();
    // 2^3 micro-steps: the sums of the first four, of two after them, and of the last but one.
    const Usage eight = usage(ranks(), options, {.micro_steps = 8});
    EXPECT_LE(eight.in_backwards.gradient, kept + 3 * owned) << "stage " << stage;
    EXPECT_GT(eight.in_backwards.gradient, kept + 2 * owned) << "stage " << stage;
    EXPECT_EQ(eight.gradient_before_step, kept) << "stage " << stage;
    const Usage five = usage(ranks(), options, {.micro_steps = 5});
    EXPECT_LE(five.in_backwards.gradient, kept + 2 * owned) << "stage " << stage;
    EXPECT_EQ(five.gradient_before_step, kept) << "stage " << stage;
    EXPECT_EQ(five.gradient_after_step, 0);
  }
}

TEST_P(AccumulationMemoryTest, OfBfloat16IsByTheDtypeOfAccumulation) {
  Options options;
  options.stage = Stage::kGradients;
  options.compute_dtype = torch::kBFloat16;
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    const auto size = static_cast<int64_t>(c10::elementSize(dtype));
    options.accumulate_dtype = dtype;
    const Usage each =
        usage(ranks(), options, {.micro_steps = 4, .reduce = ReduceMicroSteps::kEach});
    EXPECT_EQ(each.in_backwards.gradient, size * kNumel / ranks());
    EXPECT_LE(each.in_backwards.bucket, 256_KiB);
    const Usage once =
        usage(ranks(), options, {.micro_steps = 4, .reduce = ReduceMicroSteps::kOnce});
    EXPECT_GE(once.in_backwards.bucket, size * kNumel);
    // Pages that are on their way lie there once more, as they travel.
    EXPECT_LE(once.in_backwards.bucket, size * kNumel + (size == 4 ? 2 * kNumel : 0));
  }
}

TEST_P(AccumulationMemoryTest, SendsAReductionAMicroStepOrOne) {
  for (const int stage : {1, 2, 3}) {
    const int64_t one = 4 * kNumel / ranks() * (ranks() - 1);
    EXPECT_EQ(usage_at(stage, ranks(), ReduceMicroSteps::kEach).reduce_scattered,
              kMicroSteps * one);
    EXPECT_EQ(usage_at(stage, ranks(), ReduceMicroSteps::kOnce).reduce_scattered, one);
  }
  // Beside the gradients a byte a parameter says which there are.
  const int64_t each = usage_at(0, ranks(), ReduceMicroSteps::kEach).all_reduced;
  const int64_t once = usage_at(0, ranks(), ReduceMicroSteps::kOnce).all_reduced;
  EXPECT_GT(once, 4 * kNumel / ranks() * (ranks() - 1));
  EXPECT_EQ(each, kMicroSteps * once);
}

TEST_P(AccumulationMemoryTest, AutoReducesOnceWhereWholeGradientsFitTheBudget) {
  Options options;
  options.stage = Stage::kGradients;
  run_ranks(ranks(), [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Sequential> model(make_layers(), world, options);
    const auto reduces_each = [&](int64_t budget) {
      return Accumulator(model, {.micro_steps = 2, .gradient_budget_bytes = budget})
                 .reduction()
                 .when == ReduceMicroSteps::kEach;
    };
    EXPECT_TRUE(reduces_each(0));
    EXPECT_TRUE(reduces_each(whole_bytes() - 1));
    EXPECT_FALSE(reduces_each(whole_bytes()));
  });
}

// All bytes of a step: gradients, the new parameters, and what ranks compare.
TEST_P(AccumulationMemoryTest, SendsAQuarterOrLessOfEightMicroStepsByDefault) {
  for (const int stage : {0, 1}) {
    const Usage each = usage_at(stage, ranks(), ReduceMicroSteps::kEach);
    const Usage by_default = usage_at(stage, ranks(), ReduceMicroSteps::kAuto);
    EXPECT_LE(4 * by_default.sent, each.sent) << "stage " << stage;
    std::cout << "stage " << stage << ", " << ranks() << " ranks, " << kMicroSteps
              << " micro-steps: " << each.sent << " bytes sent by kEach, " << by_default.sent
              << " by kAuto\n";
  }
  EXPECT_EQ(usage_at(2, ranks(), ReduceMicroSteps::kAuto).sent,
            usage_at(2, ranks(), ReduceMicroSteps::kEach).sent);
}

// The choice costs no byte on the device or the host, wherever the optimizer is.
TEST_P(AccumulationMemoryTest, TakesNoMoreByDefaultThanReducedEachAtStagesZeroAndOne) {
  for (const int stage : {0, 1}) {
    for (const memory::Tier tier : {memory::Tier::kDevice, memory::Tier::kHost}) {
      Options options;
      options.stage = stage_of(stage);
      options.offload.optimizer = tier;
      const Usage each =
          usage(ranks(), options, {.micro_steps = 4, .reduce = ReduceMicroSteps::kEach});
      const Usage by_default = usage(ranks(), options, {.micro_steps = 4});
      EXPECT_LE(by_default.peak, each.peak) << "stage " << stage;
      EXPECT_LE(by_default.in_backwards.gradient, each.in_backwards.gradient) << "stage " << stage;
      EXPECT_LE(by_default.in_backwards.bucket, each.in_backwards.bucket) << "stage " << stage;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, AccumulationMemoryTest, ::testing::Values(2, 4));

}  // namespace
}  // namespace zeropage::accumulation_memory_test

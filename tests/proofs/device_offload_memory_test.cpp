// What offloaded training holds on an accelerator and on the host, and what it moves between them: the
// formulas of offload/README.md.
#include <algorithm>

#include <gtest/gtest.h>

#include "memory/device_memory.h"
#include "tests/harness/device_ranks.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/testing.h"
#include "zeropage/zeropage.h"

namespace zeropage::device_offload_memory_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using memory::Tier;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int kSteps = 2;
constexpr auto kAccelerator = c10::DeviceType::PrivateUse1;

class OffloadFormulaOnDeviceTest : public ::testing::TestWithParam<int> {
 protected:
  static constexpr int64_t kLayers = 4;
  static constexpr int64_t kWidth = 128;
  static constexpr int64_t kNumel = kLayers * kWidth * kWidth;
  static constexpr int kRanks = 2;

  int stage() const { return GetParam(); }
  Options options() const {
    Options options;
    options.stage = stage_of(GetParam());
    options.page_bytes = 4 * kWidth * kWidth;
    options.offload.optimizer = Tier::kHost;
    return options;
  }
  int64_t owned_numel() const { return stage() > 0 ? kNumel / kRanks : kNumel; }

  // A layer a page, without padding. look: after each operator, backward and step.
  template <typename Look>
  static void train(comm::World& world, const Options& options, int64_t micro_steps,
                    const Look& look) {
    torch::nn::Sequential net;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      net->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    }
    net->to(world.device());
    DistributedDataParallel<torch::nn::Sequential> model(net, world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    Accumulator accumulator(model, {.micro_steps = micro_steps});
    const auto dtype = options.compute_dtype.value_or(torch::kFloat);
    for (int64_t index = 0; index < kSteps * micro_steps; ++index) {
      auto x = torch::ones({2, kWidth}, torch::TensorOptions(world.device()).dtype(dtype));
      for (auto& layer : *model.module()) {
        x = layer.forward(x);
        x.register_hook([&](const torch::Tensor&) { look(model); });
      }
      accumulator.backward(x.sum());
      look(model);
      if ((index + 1) % micro_steps == 0) accumulator.step(optimizer);
      look(model);
    }
  }

 private:
  const FakeMemoryOnLedgers on_ledgers_;
};

TEST_P(OffloadFormulaOnDeviceTest, HoldsNothingOfTheOptimizerOnTheDevice) {
  on_devices(Carrier::kDevice, kRanks, [&](comm::World& world) {
    const memory::Ledger& ledger = *memory::Ledger::current();
    for (const bool low : {false, true}) {
      Options options = this->options();
      const int64_t value_bytes = low ? 2 : 4;
      const int64_t page_bytes = kWidth * kWidth * value_bytes;
      options.page_bytes = page_bytes;
      if (low) options.compute_dtype = options.accumulate_dtype = torch::kBFloat16;
      int64_t most_states = 0, most_gradient = 0, most_staging = 0, most_host_staging = 0;
      memory::Breakdown device, host;
      train(world, options, /*micro_steps=*/1, [&](const DistributedDataParallelBase&) {
        device = ledger.now(kAccelerator);
        host = ledger.offloaded(Tier::kHost);
        most_states =
            std::max(most_states, device[Kind::kOptimizerState] + device[Kind::kMasterWeights]);
        most_gradient = std::max(most_gradient, device[Kind::kGradient]);
        most_staging = std::max(most_staging, device[Kind::kBucket] + device[Kind::kStaging]);
        most_host_staging = std::max(most_host_staging, host[Kind::kStaging]);
      });
      const int64_t numel = owned_numel();
      EXPECT_EQ(host[Kind::kOptimizerState], 8 * numel) << memory::to_text(host);
      EXPECT_EQ(host[Kind::kMasterWeights], 4 * numel) << memory::to_text(host);
      EXPECT_EQ(host[Kind::kGradient], value_bytes * numel) << memory::to_text(host);
      EXPECT_EQ(most_states, 0);
      EXPECT_LE(most_staging, stage() >= 2 ? 2 * page_bytes : 0);
      EXPECT_EQ(most_host_staging, low ? 2 * page_bytes * numel / kNumel : 0);
      EXPECT_EQ(device[Kind::kParameter], value_bytes * kNumel / (stage() == 3 ? kRanks : 1))
          << memory::to_text(device);
      EXPECT_EQ(device[Kind::kGradient], 0) << "after a step: " << memory::to_text(device);
      EXPECT_EQ(most_gradient, stage() >= 2 ? 0 : value_bytes * kNumel);
    }
    EXPECT_EQ(ledger.offloaded(Tier::kHost).total(), 0);
  });
}

TEST_P(OffloadFormulaOnDeviceTest, MovesAGradientDownAndAValueUpAStep) {
  on_devices(Carrier::kDevice, kRanks, [&](comm::World& world) {
    for (const bool low : {false, true}) {
      for (const StepWhen when : {StepWhen::kInStep, StepWhen::kInBackward}) {
        Options options = this->options();
        if (low) options.compute_dtype = options.accumulate_dtype = torch::kBFloat16;
        options.offload.step = when;
        int64_t down = 0, up = 0;
        train(world, options, /*micro_steps=*/3, [&](const DistributedDataParallelBase& model) {
          const auto& copies = sharded_parameters_of(model).pages->page_offload()->copies();
          down = copies.bytes(offload::Direction::kToHost);
          up = copies.bytes(offload::Direction::kToDevice);
        });
        const int64_t value_bytes = low ? 2 : 4;
        EXPECT_EQ(down, kSteps * value_bytes * owned_numel());
        EXPECT_EQ(up, kSteps * value_bytes * owned_numel());
      }
    }
  });
}

// Sums on the device are the rank's, though autograd's thread makes them.
TEST_P(OffloadFormulaOnDeviceTest, HoldsSumsOfMicroStepsOnTheDeviceUntilTheLast) {
  on_devices(Carrier::kDevice, kRanks, [&](comm::World& world) {
    const memory::Ledger& ledger = *memory::Ledger::current();
    Options options = this->options();
    std::vector<int64_t> held;
    train(world, options, /*micro_steps=*/2, [&](const DistributedDataParallelBase&) {
      held.push_back(ledger.now(kAccelerator)[Kind::kGradient]);
    });
    const int64_t most = *std::max_element(held.begin(), held.end());
    if (stage() >= 2) {
      EXPECT_EQ(most, 4 * owned_numel());
    } else {
      EXPECT_LE(most, 4 * (kNumel + owned_numel()));
    }
    EXPECT_EQ(held.back(), 0) << "after a step";
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, OffloadFormulaOnDeviceTest, ::testing::Values(0, 1, 2, 3));

}  // namespace
}  // namespace zeropage::device_offload_memory_test

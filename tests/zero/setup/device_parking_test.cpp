// A model that is parked leaves an accelerator whose streams are late by random times, to the host and to NVMe, and goes on
// with the bits of one that never was.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/device_ranks.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "zeropage/zeropage.h"

namespace zeropage::device_parking_test {
namespace {

using namespace zeropage::testing;
using memory::Tier;
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr auto kLateBy = std::chrono::microseconds(40);

struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    for (const auto& [from, to] : {std::pair(7, 48), {48, 48}, {48, 7}}) {
      layers->push_back(torch::nn::Linear(from, to));
    }
    register_module("layers", layers);
    table = register_buffer("table", torch::full({7}, 0.5));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = x * table.to(x.scalar_type());
    for (const auto& layer : *layers) x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList layers;
  torch::Tensor table;
};
TORCH_MODULE(Normed);

struct Place {
  int stage;
  int ranks;
  Tier optimizer = Tier::kDevice;
  StepWhen step = StepWhen::kInStep;
  bool low_precision = false;
};

class DeviceParkingTest : public ::testing::TestWithParam<Place> {
 protected:
  DeviceParkingTest() {
    register_fake_accelerator();
    at::set_num_threads(1);
    set_fake_delays(5, kLateBy);
  }
  ~DeviceParkingTest() override { set_fake_delays(0, {}); }

  static Options options() {
    const Place& place = GetParam();
    Options options;
    options.stage = stage_of(place.stage);
    options.page_bytes = 4096;
    options.offload.optimizer = place.optimizer;
    options.offload.step = place.step;
    if (place.low_precision) options.compute_dtype = torch::kBFloat16;
    return options;
  }

  template <typename Model>
  static void train_step(Model& model, torch::optim::Optimizer& optimizer, int step) {
    const Samples samples = samples_on(model.world().device(), model.world().rank(), step);
    optimizer.zero_grad();
    loss_of(model(samples.inputs).to(torch::kFloat), samples).backward();
    optimizer.step();
    optimizer.zero_grad();
  }

  // Rank 0's values in the end. to: kDevice: it is never parked.
  std::vector<torch::Tensor> run(Tier to) {
    std::vector<torch::Tensor> result;
    on_devices(Carrier::kDevice, GetParam().ranks, [&](comm::World& world) {
      const auto ledger = memory::Ledger::current();
      DistributedDataParallel<Normed> model(make_on<Normed>(world.device()), world, options());
      Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
      for (int step = 0; step < 4; ++step) {
        train_step(model, optimizer, step);
        if (to == Tier::kDevice) continue;
        const int64_t held = ledger->now(world.device().type()).persistent();
        const int64_t away = ledger->offloaded(to).total();
        constexpr auto kOther = memory::Kind::kActivationAndOther;
        const int64_t other = ledger->now(world.device().type())[kOther];
        model.park(to, disk_.path());
        // The script's own data stay; of what nobody named, the buffer leaves.
        const memory::Breakdown left = ledger->now(world.device().type());
        EXPECT_EQ(left.total(), left[kOther])
            << memory::memory_table(std::vector<memory::MemoryColumn>{{"parked", left, 0}});
        EXPECT_GE(other - left[kOther], 512);
        // The device has blocks of 512 bytes.
        EXPECT_GT(2 * (ledger->offloaded(to).total() - away), held);
        // Another program has the device meanwhile.
        {
          const torch::Tensor theirs = torch::full({1 << 16}, 3.0, world.device());
          EXPECT_EQ(theirs.sum().cpu().item<float>(), 3.0F * (1 << 16));
        }
        model.resume();
        EXPECT_EQ(ledger->offloaded(to).total(), away);
      }
      const auto state = full_state(model);
      if (world.rank() != 0) return;
      for (const auto& item : state) result.push_back(item.value().cpu());
    });
    return result;
  }

  const FakeMemoryOnLedgers ledgers_;
  const DiskFolder disk_;
};

TEST_P(DeviceParkingTest, LeavesNothingAndGoesOnWithTheSameBits) {
  const auto expected = run(Tier::kDevice);
  EXPECT_TRUE(same_bits(expected, run(Tier::kHost)));
  EXPECT_TRUE(same_bits(expected, run(Tier::kNvme)));
  EXPECT_TRUE(disk_.empty());
}

INSTANTIATE_TEST_SUITE_P(Places, DeviceParkingTest,
                         ::testing::Values(Place{0, 1}, Place{1, 2}, Place{2, 2}, Place{3, 2},
                                           Place{3, 1},
                                           Place{3, 2, Tier::kHost, StepWhen::kInStep, true},
                                           Place{1, 2, Tier::kHost, StepWhen::kInBackward, true},
                                           Place{2, 2, Tier::kHost, StepWhen::kOneStepLate, true},
                                           Place{1, 2, Tier::kDevice, StepWhen::kInStep, true}));

// Another program takes the device's memory and keeps it for a while.
TEST(DeviceParkingWithoutRoomTest, StaysParkedUntilThereIsRoom) {
  register_fake_accelerator();
  at::set_num_threads(1);
  on_devices(Carrier::kDevice, 2, [&](comm::World& world) {
    DistributedDataParallel<Normed> model(make_on<Normed>(world.device()), world);
    const torch::Tensor before = model->table.cpu().clone();
    model.park(Tier::kHost);
    if (world.rank() == 1) {
      set_fake_memory_limit(world.device().index(),
                            fake_memory(world.device().index()).current_bytes + 512);
    }
    EXPECT_NE(error_of([&] { model.resume(); }), "");
    EXPECT_TRUE(model.is_parked());
    EXPECT_THAT(error_of([&] { model->table.sum(); }), HasSubstr("resume()"));
    if (world.rank() == 1) set_fake_memory_limit(world.device().index(), 0);
    model.resume();
    EXPECT_TRUE(torch::equal(before, model->table.cpu()));
  });
}

}  // namespace
}  // namespace zeropage::device_parking_test

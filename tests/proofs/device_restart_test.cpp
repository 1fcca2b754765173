// State of an accelerator whose streams are late by random times (tests/harness/fake_accelerator): a save
// has what the device will have computed, a load is there before what follows it.
#include <gtest/gtest.h>

#include "tests/harness/device_ranks.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/restarts.h"
#include "zeropage/zeropage.h"

namespace zeropage::device_restart_test {
namespace {

using namespace zeropage::testing;
using memory::Tier;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr auto kLateBy = std::chrono::microseconds(40);

struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    for (const auto& [from, to] : {std::pair(7, 48), {48, 48}, {48, 48}, {48, 7}}) {
      layers->push_back(torch::nn::Linear(from, to));
    }
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& layer : *layers) x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Layers);

struct Place {
  int stage;
  int ranks;
  Tier optimizer = Tier::kDevice;
  bool low_precision = false;
};

class DeviceRestartTest : public ::testing::TestWithParam<std::pair<Place, Place>> {
 protected:
  DeviceRestartTest() {
    register_fake_accelerator();
    at::set_num_threads(1);
    set_fake_delays(5, kLateBy);
  }
  ~DeviceRestartTest() override { set_fake_delays(0, {}); }

  // What a run from one state to another leaves there; by async saves or not.
  void run(const Place& place, int first, int end, const std::string& load,
           const std::string& save_to, bool asynchronous) {
    Options options;
    options.stage = stage_of(place.stage);
    options.page_bytes = 4096;
    options.offload.optimizer = place.optimizer;
    if (place.low_precision) options.compute_dtype = torch::kBFloat16;
    on_devices(Carrier::kDevice, place.ranks, [&](comm::World& world) {
      DistributedDataParallel<Layers> model(make_on<Layers>(world.device()), world, options);
      Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
      if (!load.empty()) load_state(load, model, optimizer);
      StateSaver saver(save_to, world, {.asynchronous = asynchronous});
      for (int step = first; step < end; ++step) train_step(model, optimizer, step);
      saver.save(model, optimizer);
      // What follows must not change what was saved.
      train_step(model, optimizer, 99);
      saver.wait();
    });
  }

  template <typename Model>
  static void train_step(Model& model, torch::optim::Optimizer& optimizer, int step) {
    const Samples samples = samples_on(model.world().device(), /*rank=*/0, step);
    optimizer.zero_grad();
    loss_of(model(samples.inputs).to(torch::kFloat), samples).backward();
    optimizer.step();
  }

  const FakeMemoryOnLedgers ledgers_;
  const DiskFolder disk_;
};

TEST_P(DeviceRestartTest, GoesOnWithTheSameBits) {
  const auto& [before, after] = GetParam();
  const std::string path = disk_.path();
  run(before, 0, 4, "", path + "/whole", /*asynchronous=*/false);
  run(before, 0, 2, "", path + "/half", /*asynchronous=*/true);
  run(after, 2, 4, path + "/half", path + "/resumed", /*asynchronous=*/true);
  EXPECT_TRUE(files_of(path + "/whole/step-4") == files_of(path + "/resumed/step-4"));
}

// What is offloaded is updated by the fused step, what is not by the class: each stays with its bits.
INSTANTIATE_TEST_SUITE_P(
    Moves, DeviceRestartTest,
    ::testing::Values(std::pair(Place{3, 2}, Place{1, 1}), std::pair(Place{0, 1}, Place{3, 2}),
                      std::pair(Place{2, 2, Tier::kHost}, Place{3, 1, Tier::kHost}),
                      std::pair(Place{1, 1, Tier::kHost}, Place{3, 2, Tier::kHost}),
                      std::pair(Place{3, 2, Tier::kHost, true}, Place{1, 2, Tier::kHost, true})));

}  // namespace
}  // namespace zeropage::device_restart_test

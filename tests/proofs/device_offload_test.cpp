// Offloaded training on an accelerator whose streams are late by random times (tests/harness/
// fake_accelerator): the bits of the fused update on the host, the bytes of the formula over the
// link, nothing of the optimizer on the device, and no copy that overtakes what it must wait for.
#include <future>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/device_ranks.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zero/update/offloaded_steps.h"
#include "zeropage/zeropage.h"

namespace zeropage::device_offload_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using memory::Tier;
using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr auto kLateBy = std::chrono::microseconds(40);
constexpr auto kHeldFor = std::chrono::milliseconds(100);
constexpr auto kAccelerator = c10::DeviceType::PrivateUse1;

// Every layer is a page of its own, in bf16 too; one of them nobody uses. [batch, 7] -> [batch, 7]
struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    for (const auto& [from, to] : {std::pair(7, 48), {48, 48}, {48, 48}, {48, 48}, {48, 7}}) {
      layers->push_back(torch::nn::Linear(from, to));
    }
    register_module("layers", layers);
    unused = register_module("unused", torch::nn::Linear(48, 48));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& layer : *layers) x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList layers;
  torch::nn::Linear unused{nullptr};
};
TORCH_MODULE(Layers);

torch::Tensor copy_on_host(const torch::Tensor& tensor) {
  return tensor.detach().to(torch::kCPU, /*non_blocking=*/false, /*copy=*/true);
}

std::vector<torch::Tensor> values_of(const DistributedDataParallelBase& model) {
  std::vector<torch::Tensor> values;
  visit_parameters(model, [&](const std::string&, const torch::Tensor& parameter) {
    values.push_back(copy_on_host(parameter));
  });
  return values;
}

Options at_stage(int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;  // many pages and buckets
  return options;
}

// How a run trains; what is not said is the same everywhere.
struct Training {
  Options options;
  int64_t steps = 2;
  int64_t micro_steps = 1;  // above 1, or with a clip_norm: by an accumulator
  std::optional<double> clip_norm;
};

template <typename Module, typename A>
std::vector<torch::Tensor> train(const comm::World& world, const Training& run,
                                 const typename OptimizerTraits<A>::Options& algorithm) {
  DistributedDataParallel<Module> model(make_on<Module>(world.device()), world, run.options);
  Optimizer<A> optimizer(model, algorithm);
  const auto loss_at = [&](int64_t index) {
    const auto samples = samples_on(world.device(), world.rank(), static_cast<int>(index));
    return loss_of(model(samples.inputs).to(torch::kFloat), samples);
  };
  if (run.micro_steps == 1 && !run.clip_norm) {
    for (int64_t step = 0; step < run.steps; ++step) {
      optimizer.zero_grad();
      loss_at(step).backward();
      optimizer.step();
    }
    return values_of(model);
  }
  Accumulator accumulator(model, {.micro_steps = run.micro_steps, .clip_norm = run.clip_norm});
  for (int64_t index = 0; index < run.steps * run.micro_steps; ++index) {
    accumulator.backward(loss_at(index));
    if ((index + 1) % run.micro_steps == 0) accumulator.step(optimizer);
  }
  return values_of(model);
}

// Parameters: the transport, the ranks and the stage.
class OffloadOnDeviceTest : public ::testing::TestWithParam<std::tuple<Carrier, int, int>> {
 protected:
  OffloadOnDeviceTest() {
    register_fake_accelerator();
    at::set_num_threads(1);
    set_fake_delays(5, kLateBy);
  }
  ~OffloadOnDeviceTest() override { set_fake_delays(0, {}); }

  Carrier carrier() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
  int stage() const { return std::get<2>(GetParam()); }

  template <typename Module, typename A>
  std::vector<torch::Tensor> host_values(
      const Training& run, const typename OptimizerTraits<A>::Options& algorithm) const {
    std::vector<torch::Tensor> values;
    run_ranks(ranks(), [&](comm::World& world) {
      const auto own = train<Module, A>(world, run, algorithm);
      if (world.rank() == 0) values = own;
    });
    return values;
  }

  template <typename Module, typename A = AdamW>
  void expect_bits(const std::vector<torch::Tensor>& expected, const Training& run,
                   const typename OptimizerTraits<A>::Options& algorithm) const {
    const OffloadOptions& offload = run.options.offload;
    on_devices(carrier(), ranks(), [&](comm::World& world) {
      EXPECT_TRUE(same_bits(expected, train<Module, A>(world, run, algorithm)))
          << "rank " << world.rank() << ", step " << static_cast<int>(offload.step)
          << ", optimizer on " << memory::name(offload.optimizer) << ", parameters on "
          << memory::name(offload.parameters);
    });
  }

  // Offloaded in every way that gives the bits of the fused update on the host, where all stays.
  template <typename Module, typename A = AdamW>
  void expect_the_hosts_bits(Training run,
                             const typename OptimizerTraits<A>::Options& algorithm) const {
    run.options.update_by = UpdateBy::kFused;
    const auto expected = host_values<Module, A>(run, algorithm);
    run.options.update_by = UpdateBy::kAuto;
    run.options.offload.optimizer = Tier::kHost;
    for (const StepWhen when : {StepWhen::kInStep, StepWhen::kInBackward}) {
      run.options.offload.step = when;
      run.options.offload.parameters = Tier::kDevice;
      expect_bits<Module, A>(expected, run, algorithm);
      if (stage() != 3) continue;
      run.options.offload.parameters = Tier::kHost;
      expect_bits<Module, A>(expected, run, algorithm);
    }
  }
};

TEST_P(OffloadOnDeviceTest, GivesTwoMicroStepsTheHostsBits) {
  expect_the_hosts_bits<Layers>({.options = at_stage(stage()), .micro_steps = 2},
                                AdamWOptions(0.01));
}

TEST_P(OffloadOnDeviceTest, GivesBfloat16ParametersTheHostsBits) {
  Training run{.options = at_stage(stage()), .micro_steps = 2};
  run.options.compute_dtype = torch::kBFloat16;
  expect_the_hosts_bits<Layers>(run, AdamWOptions(0.01));
  run.options.accumulate_dtype = torch::kBFloat16;
  const auto algorithm = SGDOptions(0.01).momentum(0.9);
  const auto expected = host_values<Oddball, SGD>(run, algorithm);
  run.options.offload = {.optimizer = Tier::kHost, .step = StepWhen::kInBackward};
  expect_bits<Oddball, SGD>(expected, run, algorithm);
}

TEST_P(OffloadOnDeviceTest, GivesATransformerTheHostsBits) {
  Training run{.options = at_stage(stage())};
  const auto expected = host_values<Transformer, AdamW>(run, AdamWOptions(0.01));
  run.options.offload = {.optimizer = Tier::kHost,
                         .parameters = stage() == 3 ? Tier::kHost : Tier::kDevice,
                         .step = StepWhen::kInBackward};
  expect_bits<Transformer>(expected, run, AdamWOptions(0.01));
}

// What that gives on the host is a proof of its own (offload_test.cpp).
TEST_P(OffloadOnDeviceTest, OneStepLateHasTheBitsThatItHasOnTheHost) {
  Training run{.options = at_stage(stage()), .steps = 3};
  run.options.offload = {.optimizer = Tier::kHost, .step = StepWhen::kOneStepLate};
  expect_bits<Layers>(host_values<Layers, AdamW>(run, AdamWOptions(0.01)), run, AdamWOptions(0.01));
  run.options.compute_dtype = torch::kBFloat16;
  run.micro_steps = 2;
  const auto expected = host_values<Oddball, AdamW>(run, AdamWOptions(0.01));
  expect_bits<Oddball>(expected, run, AdamWOptions(0.01));
  // A parameter without a gradient stays as it was.
  const auto unused = make_on<Oddball>(torch::kCPU)->unused->weight.to(torch::kBFloat16);
  EXPECT_TRUE(std::any_of(expected.begin(), expected.end(), [&](const torch::Tensor& values) {
    return torch::equal(values, unused);
  }));
}

TEST_P(OffloadOnDeviceTest, OnNvmeHasTheHostsBits) {
  const DiskFolder folder;
  Training run{.options = at_stage(stage()), .micro_steps = 2};
  const auto expected = host_values<Layers, AdamW>(run, AdamWOptions(0.01));
  run.options.offload = {.optimizer = Tier::kNvme,
                         .parameters = stage() == 3 ? Tier::kNvme : Tier::kDevice,
                         .step = StepWhen::kInBackward,
                         .nvme_directory = folder.path()};
  expect_bits<Layers>(expected, run, AdamWOptions(0.01));
}

// Gradients in both places, and one norm of them. Of the pages that stay, the device's update is the
// class's, as the fake has no other: with a learning rate of a power of two and nothing else, SGD
// rounds alike in both.
TEST_P(OffloadOnDeviceTest, OfPartOfThePagesClippedHasTheHostsBits) {
  Training run{.options = at_stage(stage()), .clip_norm = 0.1};
  const auto expected = host_values<Layers, SGD>(run, SGDOptions(0.25));
  run.options.offload.optimizer = Tier::kHost;
  run.options.offload.optimizer_bytes = 60_KiB;
  expect_bits<Layers, SGD>(expected, run, SGDOptions(0.25));
}

TEST_P(OffloadOnDeviceTest, SynchronisesNoDeviceAndRecordsNoStream) {
  Training run{.options = at_stage(stage())};
  run.options.offload.optimizer = Tier::kHost;
  if (stage() == 3) run.options.offload.parameters = Tier::kHost;
  reset_fake_counters();
  on_devices(carrier(), ranks(),
             [&](comm::World& world) { train<Layers, AdamW>(world, run, AdamWOptions(0.01)); });
  EXPECT_EQ(fake_counters().device_syncs, 0);
  EXPECT_EQ(fake_counters().record_stream, 0);
}

INSTANTIATE_TEST_SUITE_P(CarriersRanksStages, OffloadOnDeviceTest,
                         ::testing::Combine(::testing::Values(Carrier::kDevice),
                                            ::testing::Values(1, 2), ::testing::Values(0, 1, 2, 3)),
                         [](const auto& info) {
                           return c10::str(name(std::get<0>(info.param)), "Ranks",
                                           std::get<1>(info.param), "Stage",
                                           std::get<2>(info.param));
                         });
INSTANTIATE_TEST_SUITE_P(ThroughTheHost, OffloadOnDeviceTest,
                         ::testing::Values(std::make_tuple(Carrier::kStaged, 2, 3)));

class OffloadStreamsTest : public ::testing::Test {
 protected:
  OffloadStreamsTest() { register_fake_accelerator(); }

  static void run(const RankFunction& fn) { on_devices(Carrier::kDevice, 2, fn); }
};

// Holds the compute stream for a while, from another thread.
class HeldForAWhile {
 public:
  explicit HeldForAWhile(c10::Device device)
      : held_(std::make_unique<HeldStream>(
            c10::impl::VirtualGuardImpl(kAccelerator).getStream(device))),
        release_(std::async(std::launch::async, [this] {
          std::this_thread::sleep_for(kHeldFor);
          held_.reset();
        })) {}

 private:
  std::unique_ptr<HeldStream> held_;
  std::future<void> release_;  // last: it uses the other
};

TEST_F(OffloadStreamsTest, AStepChangesNoParameterThatTheDeviceStillReads) {
  for (const int stage : {1, 2}) {
    run([&](comm::World& world) {
      Options options = at_stage(stage);
      options.offload.optimizer = Tier::kHost;
      DistributedDataParallel<Oddball> model(make_on<Oddball>(world.device()), world, options);
      Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
      const auto samples = samples_on(world.device(), world.rank(), 0);
      loss_of(model(samples.inputs), samples).backward();
      const torch::Tensor& weight = model.module()->first->weight;
      const torch::Tensor before = copy_on_host(weight);
      torch::Tensor read;
      {
        const HeldForAWhile held(world.device());
        read = weight.detach().clone();
        optimizer.step();
      }
      EXPECT_TRUE(same_bits({before}, {read.cpu()}));
      EXPECT_FALSE(same_bits({before}, {copy_on_host(weight)}));
    });
  }
}

TEST_F(OffloadStreamsTest, AStepChangesNoOffloadedParameterThatIsStillOnItsWay) {
  run([&](comm::World& world) {
    Options options = at_stage(3);
    options.offload = {.optimizer = Tier::kHost, .parameters = Tier::kHost};
    DistributedDataParallel<Layers> model(make_on<Layers>(world.device()), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    const auto samples = samples_on(world.device(), world.rank(), 0);
    loss_of(model(samples.inputs), samples).backward();
    const torch::NoGradGuard no_grad;
    const torch::Tensor before = copy_on_host(model(samples.inputs));
    torch::Tensor evaluated;
    {
      const HeldForAWhile held(world.device());
      evaluated = model(samples.inputs);
      optimizer.step();
    }
    EXPECT_TRUE(same_bits({before}, {evaluated.cpu()}));
    EXPECT_FALSE(same_bits({before}, {copy_on_host(model(samples.inputs))}));
  });
}

TEST_F(OffloadStreamsTest, ClippingChangesNoGradientThatIsStillOnItsWay) {
  run([&](comm::World& world) {
    Options options = at_stage(2);
    options.offload.optimizer = Tier::kHost;
    DistributedDataParallel<Oddball> model(make_on<Oddball>(world.device()), world, options);
    // Alike on all ranks, so that the mean is each one's own. A look at it would leave its page.
    Oddball plain = make_on<Oddball>(torch::kCPU);
    loss_of(plain->forward(samples_of(0, 0).inputs), samples_of(0, 0)).backward();
    const torch::Tensor before = plain->first->weight.grad();
    const auto samples = samples_on(world.device(), /*rank=*/0, 0);
    loss_of(model(samples.inputs), samples).backward();
    const torch::Tensor& gradient = model.module()->first->weight.grad();
    torch::Tensor read;
    {
      const HeldForAWhile held(world.device());
      read = gradient * 1;
      clip_grad_norm_(model, 1e-3);
    }
    EXPECT_TRUE(same_bits({before}, {read.cpu()}));
    EXPECT_FALSE(same_bits({before}, {copy_on_host(gradient * 1)}));
  });
}

// It waits for nothing that comes after start() on the default stream, where compute may be; and on no
// other device anything.
TEST_F(OffloadStreamsTest, NewValuesGoUpBesideComputeFromAThreadOfTheRanksDevice) {
  run([&](comm::World& world) {
    Options options = at_stage(2);
    options.offload.optimizer = Tier::kHost;
    const auto page_offload = zero::PageOffload::make(world, options);
    const torch::Tensor values =
        page_offload->values().add(/*page=*/0, 256, torch::kFloat, 1.5, Kind::kMasterWeights);
    EXPECT_TRUE(values.is_pinned());
    const torch::Tensor on_device = torch::zeros({256}, world.device());
    zero::OffloadedSteps steps(page_offload, zero::OffloadedSteps::Publish::kAtOnce);
    const size_t part = steps.add({.page = 0, .name = "", .values = values, .to = on_device});
    const c10::impl::VirtualGuardImpl guard(kAccelerator);
    std::unique_ptr<HeldStream> held;
    c10::Device of_thread(torch::kCPU);
    steps.start(part,
                [&](const torch::Tensor&) {
                  of_thread = guard.getDevice();
                  held = std::make_unique<HeldStream>(guard.getDefaultStream(world.device()));
                },
                {});
    steps.wait(part);
    EXPECT_EQ(of_thread, world.device());
    const auto is_up = [&] {
      const device::StreamScope beside(device::Stream::another(world.device()));
      return torch::equal(on_device.cpu(), values);
    };
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (!is_up() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    EXPECT_TRUE(is_up());
    held.reset();
    steps.take(part);
  });
}

// Else all gradients would be on the device where the host is slower than backward.
TEST_F(OffloadStreamsTest, AGradientThatWaitsForItsStepIsNotOnTheDeviceAnyMore) {
  run([&](comm::World& world) {
    Options options = at_stage(2);
    options.offload.optimizer = Tier::kHost;
    const auto page_offload = zero::PageOffload::make(world, options);
    zero::TierStorage& storage = page_offload->values();
    zero::OffloadedSteps steps(page_offload, zero::OffloadedSteps::Publish::kAtOnce);
    const auto add = [&](size_t page) {
      return steps.add({.page = page,
                        .name = "",
                        .values = storage.add(page, 256, torch::kFloat, 0, Kind::kMasterWeights)});
    };
    const size_t first = add(0), second = add(1);
    std::promise<void> slow;
    steps.start(first, [done = slow.get_future().share()](const torch::Tensor&) { done.wait(); },
                {});
    torch::Tensor gradient = torch::ones({256}, world.device());
    const c10::weak_intrusive_ptr<c10::StorageImpl> memory(gradient.storage().getWeakStorageImpl());
    {
      const memory::Pending down = page_offload->copies().start(
          offload::Direction::kToHost, storage.add(1, 256, torch::kFloat, 0, Kind::kGradient),
          gradient);
      steps.start(second, [](const torch::Tensor&) {}, {.arrival = down, .on_device = {}});
      down.synchronize();
    }
    gradient.reset();
    EXPECT_TRUE(memory.expired());
    slow.set_value();
    steps.take(first);
    steps.take(second);
  });
}

}  // namespace
}  // namespace zeropage::device_offload_test

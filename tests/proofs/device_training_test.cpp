// Training on an accelerator whose streams are late by random times (tests/harness/fake_accelerator):
// the host's bits, nothing synchronised that need not be, and the memory of the formula.
#include <future>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memory/device_memory.h"
#include "tests/harness/device_ranks.h"
#include "tests/harness/errors.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/testing.h"
#include "zeropage/zeropage.h"

namespace zeropage::device_training_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int kSteps = 3;
constexpr auto kLateBy = std::chrono::microseconds(200);
constexpr auto kAccelerator = c10::DeviceType::PrivateUse1;

template <typename Module>
Module make() {
  // Modules draw from the one generator of the process, and ranks are threads of it.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(7);
  return Module();
}

std::unique_ptr<torch::optim::Optimizer> adamw(std::vector<torch::Tensor> parameters) {
  return std::make_unique<AdamW>(std::move(parameters), AdamWOptions(0.01));
}

std::vector<torch::Tensor> on_host(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> result;
  for (const torch::Tensor& tensor : tensors) result.push_back(tensor.detach().cpu());
  return result;
}

Options options_of(int stage) {
  Options options;
  options.update_by = UpdateBy::kClass;  // the host has the fused update, that device has not
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;  // many pages and buckets
  return options;
}

template <typename Module>
void train(DistributedDataParallel<Module>& model, torch::optim::Optimizer& optimizer,
           int steps = kSteps) {
  for (int step = 0; step < steps; ++step) {
    const Samples samples = samples_on(model.world().device(), model.world().rank(), step);
    optimizer.zero_grad();
    loss_of(model(samples.inputs), samples).backward();
    optimizer.step();
  }
}

// Parameters: the transport, the ranks and the stage.
class DeviceTrainingTest : public ::testing::TestWithParam<std::tuple<Carrier, int, int>> {
 protected:
  DeviceTrainingTest() {
    register_fake_accelerator();
    at::set_num_threads(1);
    set_fake_delays(5, kLateBy);
  }
  ~DeviceTrainingTest() override { set_fake_delays(0, {}); }

  int ranks() const { return std::get<1>(GetParam()); }
  Options options() const { return options_of(std::get<2>(GetParam())); }
  void run(const RankFunction& fn) const {
    run_ranks(ranks(), fn, on_fake_devices(std::get<0>(GetParam()), ranks()));
  }

  template <typename Module>
  void expect_the_hosts_bits() const {
    const auto expected = train_reference<Module>(ranks(), kSteps, make<Module>, adamw);
    run([&](comm::World& world) {
      DistributedDataParallel<Module> model(make_on<Module>(world.device()), world, options());
      Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
      train(model, optimizer);
      EXPECT_TRUE(same_bits(expected, on_host(model.parameters()))) << "rank " << world.rank();
    });
  }
};

TEST_P(DeviceTrainingTest, GivesOddParametersTheHostsBits) {
  expect_the_hosts_bits<Oddball>();
}
TEST_P(DeviceTrainingTest, GivesATransformerTheHostsBits) {
  expect_the_hosts_bits<Transformer>();
}
TEST_P(DeviceTrainingTest, GivesConvolutionsWithBatchNormTheHostsBits) {
  expect_the_hosts_bits<ConvNet>();
}

TEST_P(DeviceTrainingTest, ConstructsDeferredModulesOnTheDevice) {
  static std::mutex mutex;
  const auto expected = train_reference<Oddball>(ranks(), kSteps, make<Oddball>, adamw);
  run([&](comm::World& world) {
    // Recording and replaying draw from the generator too.
    const auto model = [&] {
      const std::lock_guard lock(mutex);
      torch::manual_seed(7);
      return DeferredModule<Oddball>([] { return Oddball(); });
    };
    DeferredModule<Oddball> deferred = model();
    DistributedDataParallel<Oddball> wrapped(std::move(deferred), world, options());
    for (const auto& parameter : wrapped.parameters()) {
      EXPECT_EQ(parameter.device(), world.device());
    }
    Optimizer<AdamW> optimizer(wrapped, AdamWOptions(0.01));
    train(wrapped, optimizer);
    EXPECT_TRUE(same_bits(expected, on_host(wrapped.parameters()))) << "rank " << world.rank();
  });
}

TEST_P(DeviceTrainingTest, SynchronisesNoDeviceAndRecordsNoStream) {
  run([&](comm::World& world) {
    DistributedDataParallel<Transformer> model(make_on<Transformer>(world.device()), world,
                                               options());
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    train(model, optimizer, 1);
    world.communicator().barrier("counting begins").wait();
    if (world.rank() == 0) reset_fake_counters();
    world.communicator().barrier("counting has begun").wait();
    train(model, optimizer);
    world.communicator().barrier("counting ends").wait();
    EXPECT_EQ(fake_counters().device_syncs, 0);
    EXPECT_EQ(fake_counters().record_stream, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(CarriersRanksStages, DeviceTrainingTest,
                         ::testing::Combine(::testing::Values(Carrier::kStaged, Carrier::kDevice),
                                            ::testing::Values(1, 2, 3),
                                            ::testing::Values(0, 1, 2, 3)),
                         [](const auto& info) {
                           return c10::str(name(std::get<0>(info.param)), "Ranks",
                                           std::get<1>(info.param), "Stage",
                                           std::get<2>(info.param));
                         });

class DeviceStepTest : public ::testing::Test {
 protected:
  DeviceStepTest() { register_fake_accelerator(); }
};

// The trap makes compute wait for a page, never the host.
TEST_F(DeviceStepTest, TheHostWaitsForNoPage) {
  run_ranks(
      2,
      [](comm::World& world) {
        DistributedDataParallel<Oddball> model(make_on<Oddball>(world.device()), world,
                                               options_of(3));
        Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
        train(model, optimizer, 2);
        const Samples samples = samples_on(world.device(), world.rank(), 0);
        world.communicator().barrier("counting begins").wait();
        if (world.rank() == 0) reset_fake_counters();
        world.communicator().barrier("counting has begun").wait();
        // LibTorch's MultiheadAttention would compare its inputs on the host.
        loss_of(model(samples.inputs), samples).backward();
        world.communicator().barrier("counting ends").wait();
        EXPECT_EQ(fake_counters().host_syncs, 0);
        EXPECT_GT(model.paging().bytes_gathered, 0);
      },
      on_fake_devices(Carrier::kDevice, 2));
}

TEST_F(DeviceStepTest, TheHostIsNeverMoreThanAStepAhead) {
  run_ranks(
      1,
      [](comm::World& world) {
        DistributedDataParallel<Oddball> model(make_on<Oddball>(world.device()), world,
                                               options_of(0));
        Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
        train(model, optimizer, 1);
        const auto step = [&] { train(model, optimizer, 1); };
        auto held = std::make_unique<HeldStream>(
            c10::impl::VirtualGuardImpl(kAccelerator).getStream(world.device()));
        step();
        auto second = std::async(std::launch::async, step);
        EXPECT_EQ(second.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout);
        held.reset();
        second.get();
      },
      on_fake_devices(Carrier::kStaged, 1));
}

class DeviceMemoryFormulaTest : public ::testing::TestWithParam<std::tuple<int, int>> {
 private:
  const FakeMemoryOnLedgers on_ledgers_;
};

TEST_P(DeviceMemoryFormulaTest, HoldsOnTheDeviceAndTransientIsTwoPagesAndABucket) {
  const auto [ranks, stage] = GetParam();
  run_ranks(
      ranks,
      [&, ranks = ranks, stage = stage](comm::World& world) {
        torch::nn::Sequential net;
        for (int layer = 0; layer < 6; ++layer) {
          net->push_back(torch::nn::Linear(torch::nn::LinearOptions(256, 256).bias(false)));
        }
        net->to(world.device());
        Options options = options_of(stage);
        options.page_bytes = 256_KiB;  // a layer
        DistributedDataParallel<torch::nn::Sequential> model(net, world, options);
        Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
        memory::Ledger& ledger = *memory::Ledger::current();
        int64_t most_parameter = 0, most_bucket = 0;
        const auto look = [&] {
          const memory::Breakdown now = ledger.now(kAccelerator);
          most_parameter = std::max(most_parameter, now[Kind::kParameter]);
          most_bucket = std::max(most_bucket, now[Kind::kBucket]);
        };
        for (int step = 0; step < kSteps; ++step) {
          optimizer.zero_grad();
          auto x = torch::ones({2, 256}, torch::TensorOptions(world.device()));
          for (auto& layer : *model.module()) {
            x = layer.forward(x);
            look();
            x.register_hook([&](const torch::Tensor&) { look(); });
          }
          x.sum().backward();
          look();
          optimizer.step();
          look();
        }
        const int64_t numel = 6 * 256 * 256;
        const auto share = [&](int sharded_from) { return stage >= sharded_from ? ranks : 1; };
        const memory::Breakdown held = ledger.now(kAccelerator);
        EXPECT_EQ(held[Kind::kParameter], 4 * numel / share(3)) << memory::to_text(held);
        EXPECT_EQ(held[Kind::kGradient], 4 * numel / share(2)) << memory::to_text(held);
        EXPECT_EQ(held[Kind::kOptimizerState], 8 * numel / share(1)) << memory::to_text(held);
        EXPECT_EQ(held[Kind::kBucket], 0) << memory::to_text(held);
        optimizer.zero_grad();
        EXPECT_EQ(ledger.now(kAccelerator)[Kind::kGradient], 0) << memory::to_text(held);
        EXPECT_LE(most_parameter, held[Kind::kParameter] + (stage == 3 ? 2 : 0) * 256_KiB);
        EXPECT_LE(most_bucket, stage >= 2 ? 256_KiB : 0);
        EXPECT_GT(most_bucket, stage >= 2 ? 0 : -1) << "it looked at the wrong moments";
      },
      on_fake_devices(Carrier::kDevice, ranks));
}

INSTANTIATE_TEST_SUITE_P(RanksStages, DeviceMemoryFormulaTest,
                         ::testing::Combine(::testing::Values(2, 4),
                                            ::testing::Values(0, 1, 2, 3)));

// While it lives, the first fake device has no more memory.
class MemoryLimit {
 public:
  explicit MemoryLimit(int64_t bytes) { set_fake_memory_limit(0, bytes); }
  ~MemoryLimit() { set_fake_memory_limit(0, 0); }
};

TEST_F(DeviceStepTest, ModelsThatDoNotFitTheDeviceAreRefusedWithTheFiguresOnAllRanks) {
  const MemoryLimit limit(fake_memory(0).current_bytes + 1000_KiB);
  const auto errors = try_ranks(
      2,
      [](comm::World& world) {
        // 256 KiB, and as much of gradients, twice.
        torch::nn::Sequential net(torch::nn::Linear(256, 256), torch::nn::Linear(256, 256));
        net->to(world.device());
        DistributedDataParallel<torch::nn::Sequential> model(net, world, options_of(0));
      },
      on_fake_devices(Carrier::kStaged, 2));
  EXPECT_THAT(message_of(errors[0]),
              HasSubstr("[rank 0/2] the model needs 1.0 MiB on fake:0 before any activation"));
  EXPECT_THAT(message_of(errors[0]), HasSubstr("gradient                   516.0 KiB"));
  EXPECT_THAT(message_of(errors[1]), HasSubstr("[rank 1/2] rank 0: the model needs 1.0 MiB"));
}

// One rank more than devices: the first device has two ranks, and as much free memory as one of them
// needs and a half.
TEST_F(DeviceStepTest, RanksThatShareADeviceAreRefusedWhatOnlyOneOfThemCouldHave) {
  constexpr int kRanks = kFakeDevices + 1;
  const MemoryLimit limit(fake_memory(0).current_bytes + 2 * 516_KiB + 3 * 540_KiB / 2);
  const auto errors = try_ranks(
      kRanks,
      [](comm::World& world) {
        torch::nn::Sequential net(torch::nn::Linear(256, 256), torch::nn::Linear(256, 256));
        net->to(world.device());
        // Each measures what is free when all models are there.
        world.communicator().barrier("the models").wait();
        DistributedDataParallel<torch::nn::Sequential> model(net, world, options_of(0));
      },
      on_fake_devices(Carrier::kStaged, kRanks));
  for (const int rank : {0, kRanks - 1}) {
    EXPECT_THAT(message_of(errors[static_cast<size_t>(rank)]),
                HasSubstr("the model needs 1.1 MiB on fake:0 before any activation"));
    EXPECT_THAT(message_of(errors[static_cast<size_t>(rank)]),
                HasSubstr("as 2 ranks share what is free on it; use more devices"));
  }
  EXPECT_THAT(message_of(errors[1]), HasSubstr("rank 0: the model needs 1.1 MiB on fake:0"));
}

TEST_F(DeviceStepTest, OptimizersWhoseStateDoesNotFitAreRefusedBeforeTheFirstStep) {
  const MemoryLimit limit(fake_memory(0).current_bytes + 1500_KiB);
  const auto errors = try_ranks(
      1,
      [](comm::World& world) {
        torch::nn::Sequential net(torch::nn::Linear(256, 256), torch::nn::Linear(256, 256));
        net->to(world.device());
        DistributedDataParallel<torch::nn::Sequential> model(net, world, options_of(0));
        Optimizer<AdamW> optimizer(model);
      },
      on_fake_devices(Carrier::kStaged, 1));
  EXPECT_THAT(message_of(errors[0]),
              HasSubstr("the optimizer with gradients needs 1.5 MiB on fake:0"));
}

TEST_F(DeviceStepTest, ForwardOnAnotherStreamIsRefused) {
  const auto errors = try_ranks(
      1,
      [](comm::World& world) {
        DistributedDataParallel<Oddball> model(make_on<Oddball>(world.device()), world,
                                               options_of(3));
        const device::StreamScope other(device::Stream::another(world.device()));
        model(samples_on(world.device(), 0, 0).inputs);
      },
      on_fake_devices(Carrier::kStaged, 1));
  EXPECT_THAT(message_of(errors[0]),
              HasSubstr("forward(): the current stream of fake:0 is another"));
}

TEST_F(DeviceStepTest, ModulesOnAnotherDeviceAreRefusedByParameter) {
  const auto errors = try_ranks(
      1,
      [](comm::World& world) {
        Oddball module = make_on<Oddball>(world.device());
        module->last->to(c10::kCPU);
        DistributedDataParallel<Oddball> model(module, world, options_of(3));
      },
      on_fake_devices(Carrier::kStaged, 1));
  EXPECT_THAT(
      message_of(errors[0]),
      HasSubstr("parameter \"tied\": expected it on fake:0, got cpu; move the whole module"));
}

}  // namespace
}  // namespace zeropage::device_training_test

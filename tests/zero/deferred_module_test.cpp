#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/distributed_data_parallel.h"
#include "zeropage/testing.h"
#include "zeropage/zeropage.h"

namespace zeropage::deferred_module_test {
namespace {

using namespace zeropage::testing;
using memory::operator""_KiB;
using memory::operator""_MiB;

Options at_stage(int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;
  return options;
}

// Ranks are threads, and the generator of random numbers is the process's.
std::mutex& generator_mutex() {
  static std::mutex mutex;
  return mutex;
}

template <typename Module>
void expect_the_plain_constructors_bits(int stage) {
  at::set_num_threads(1);
  torch::manual_seed(17);
  const Module plain;
  run_ranks(2, [&](comm::World& world) {
    std::optional<DeferredModule<Module>> deferred;
    {
      const std::lock_guard lock(generator_mutex());
      // Rank 0's values go to all.
      torch::manual_seed(17 + static_cast<uint64_t>(world.rank()));
      deferred.emplace([] { return Module(); });
    }
    DistributedDataParallel<Module> model(std::move(*deferred), world, at_stage(stage));
    EXPECT_TRUE(same_bits(plain->parameters(), model.parameters()));
    const auto buffers = model.named_buffers();
    for (const auto& buffer : plain->named_buffers()) {
      EXPECT_TRUE(torch::equal(buffer.value(), buffers[buffer.key()])) << buffer.key();
    }
    Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1));
    const Samples samples = samples_of(world.rank(), 0);
    loss_of(model(samples.inputs), samples).backward();
    optimizer.step();
    EXPECT_TRUE(std::isfinite(loss_of(model(samples.inputs), samples).item().toDouble()));
  });
}

class DeferredModuleTest : public ::testing::TestWithParam<int> {};

TEST_P(DeferredModuleTest, HasThePlainConstructorsBits) {
  expect_the_plain_constructors_bits<Oddball>(GetParam());
  expect_the_plain_constructors_bits<ConvNet>(GetParam());
  expect_the_plain_constructors_bits<Recurrent>(GetParam());
  expect_the_plain_constructors_bits<Transformer>(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Stages, DeferredModuleTest, ::testing::Values(0, 1, 2, 3));

TEST(DeferredModuleMemoryTest, NeverHoldsMoreThanTheShareAndAParameter) {
  run_ranks(4, [](comm::World& world) {
    memory::Ledger& ledger = *memory::Ledger::current();
    constexpr int64_t kLayer = 500 * 500 * 4;
    constexpr int kLayers = 12;
    std::optional<DeferredModule<torch::nn::Sequential>> deferred;
    {
      const std::lock_guard lock(generator_mutex());
      deferred.emplace([] {
        torch::nn::Sequential net;
        for (int layer = 0; layer < kLayers; ++layer) net->push_back(torch::nn::Linear(500, 500));
        return net;
      });
    }
    EXPECT_LT(ledger.now().total(), 1_MiB) << "the constructor made parameters";
    ledger.reset_peak();
    DistributedDataParallel<torch::nn::Sequential> model(std::move(*deferred), world, at_stage(3));
    // Parameters and gradients of this rank, one parameter of the tape, segments of collectives.
    EXPECT_PEAK_BYTES_LE(ledger, 2 * kLayers * kLayer / 4 + 2 * kLayer + 4_MiB);
    EXPECT_LT(ledger.now()[memory::Kind::kParameter], 1.02 * kLayers * kLayer / 4);
  });
}

TEST(DeferredModuleErrorTest, NamesAConstructorThatReadsValues) {
  try {
    DeferredModule<torch::nn::Linear> deferred([] {
      torch::nn::Linear linear(3, 3);
      if (linear->weight.sum().item<float>() > 100) throw std::runtime_error("unlikely");
      return linear;
    });
    FAIL() << "accepted";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                ::testing::HasSubstr("the constructor reads values"));
  }
}

TEST(DeferredModuleErrorTest, RanksMustAgreeOnHowTheyConstruct) {
  const auto make = [] { return torch::nn::Linear(3, 3); };
  // A recording notices when another rank of this process draws from the one generator.
  torch::nn::Linear plain = make();
  DeferredModule<torch::nn::Linear> deferred(make);
  const auto errors = try_ranks(2, [&](comm::World& world) {
    if (world.rank() == 0) {
      DistributedDataParallel<torch::nn::Linear> model(plain, world);
    } else {
      DistributedDataParallel<torch::nn::Linear> model(std::move(deferred), world);
    }
  });
  EXPECT_THAT(message_of(errors[0]), ::testing::HasSubstr("deferred construction"));
}

}  // namespace
}  // namespace zeropage::deferred_module_test

// Limits of memory in a training run: what is refused, when, and by how much.
#include "zero/setup/memory_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/square_layers.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/bytes.h"
#include "zeropage/testing.h"
#include "zeropage/zeropage.h"

namespace zeropage::memory_limits_test {
namespace {

using namespace memory;
using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::run_ranks;

// Each layer is a page, without padding: 1 MiB in all.
constexpr int64_t kLayers = 4;
constexpr int64_t kWidth = 256;
constexpr int64_t kParameterBytes = kLayers * kWidth * kWidth * 4;

torch::nn::Sequential make_layers() {
  return testing::square_layers(kLayers, kWidth);
}

Options limited(int stage, int64_t device_bytes) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 256_KiB;
  options.device_memory_bytes = device_bytes;
  return options;
}

using Model = DistributedDataParallel<torch::nn::Sequential>;

TEST(MemoryLimitsTest, RefuseAModelThatIsTooLargeBeforeAnythingIsMoved) {
  run_ranks(2, [](comm::World& world) {
    torch::nn::Sequential layers = make_layers();
    const int64_t before = Ledger::current()->now().total();
    const std::string error =
        error_of([&] { const Model model(layers, world, limited(0, kParameterBytes)); });
    EXPECT_THAT(error, HasSubstr("the model needs 2.0 MiB of device memory a rank before any "
                                 "activation, 1.0 MiB more than the 1.0 MiB that "
                                 "options.device_memory_bytes leaves it"));
    EXPECT_THAT(error, HasSubstr("parameter                    1.0 MiB"));
    EXPECT_EQ(Ledger::current()->now().total(), before);
    // Only the wrapping was refused.
    const Model model(layers, world, limited(0, 16 * kParameterBytes));
  });
}

// Each host shares what it has among its ranks, and its tensors count where it is the device.
TEST(MemoryLimitsTest, DivideTheHostsMemoryAmongItsRanks) {
  run_ranks(2, [](comm::World& world) {
    Options options = limited(0, Options::kNoLimit);
    options.host_memory_bytes = 3 * kParameterBytes;
    EXPECT_THAT(error_of([&] { const Model model(make_layers(), world, options); }),
                HasSubstr("512.0 KiB more than the 1.5 MiB that options.host_memory_bytes"));
    EXPECT_EQ(zero::limits_of(world, options).host_bytes, 3 * kParameterBytes / 2);
    options.host_memory_bytes = 1;
    EXPECT_THAT(error_of([&] { const Model model(make_layers(), world, options); }),
                HasSubstr("more than the 1 B that options.host_memory_bytes"));
  });
}

TEST(MemoryLimitsTest, RefuseTheOptimizerWhoseStatesDoNotFit) {
  run_ranks(2, [](comm::World& world) {
    Model model(make_layers(), world, limited(0, 3 * kParameterBytes));
    EXPECT_THAT(error_of([&] { const Optimizer<torch::optim::AdamW> optimizer(model); }),
                HasSubstr("the model with its optimizer needs 4.0 MiB of device memory a rank"));
    const Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1));
  });
}

// A planted allocation over the budget.
TEST(MemoryLimitsTest, NameTheAllocationOfAStepThatPassesThem) {
  run_ranks(2, [](comm::World& world) {
    Model model(make_layers(), world, limited(0, 6 * kParameterBytes));
    Optimizer<torch::optim::AdamW> optimizer(model);
    const auto step = [&](int64_t rows) {
      model(torch::ones({rows, kWidth})).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    step(1);
    const std::string error = error_of([&] { step(600); });
    EXPECT_THAT(
        error,
        HasSubstr(
            " of activation in forward (3: aten::matmul) would pass the limit of device memory: "));
    EXPECT_THAT(error, HasSubstr("optimizer_state"));
    EXPECT_THAT(error, HasSubstr("a step as it is needs about "));
    EXPECT_THAT(error, HasSubstr(", the cheapest first:\n  micro-batch 600 -> "));
    // The step was refused, and not the model.
    step(1);
  });
}

// The module is there whole until it is in its pages.
TEST(MemoryLimitsTest, HoldWhileAModelIsWrapped) {
  run_ranks(2, [](comm::World& world) {
    constexpr int64_t kLimit = 10 * kParameterBytes;
    // Takes what a step would need.
    const torch::Tensor other = torch::empty({kLimit - kParameterBytes - 1}, torch::kByte);
    const std::string error =
        error_of([&] { const Model model(make_layers(), world, limited(0, kLimit)); });
    EXPECT_THAT(error, HasSubstr("256.0 KiB of parameter for the page, page \"0.weight\", would "
                                 "pass the limit of device memory"));
    EXPECT_THAT(error,
                HasSubstr("construct it without memory (zeropage/distributed_data_parallel.h)"));
  });
}

TEST(MemoryLimitsTest, EndWithTheModel) {
  run_ranks(1, [](comm::World& world) {
    { const Model model(make_layers(), world, limited(0, 3 * kParameterBytes)); }
    const torch::Tensor large = torch::empty({8 * kParameterBytes}, torch::kByte);
    EXPECT_EQ(large.numel(), 8 * kParameterBytes);
  });
}

TEST(MemoryLimitsTest, AreRefusedInWordsWhereTheyContradictOtherOptions) {
  const auto refused = [](const auto& change) {
    Options options = limited(3, 1_MiB);
    change(options);
    return error_of([&] { validate(options); });
  };
  EXPECT_THAT(refused([](Options& options) { options.device_memory_bytes = -1; }),
              HasSubstr("options.device_memory_bytes: expected 0 (no limit) or more, got -1"));
  EXPECT_THAT(refused([](Options& options) { options.parameter_budget_bytes = 2_MiB; }),
              HasSubstr("options.parameter_budget_bytes: 2.0 MiB cannot be used, as "
                        "options.device_memory_bytes is 1.0 MiB; lower the first or raise the "
                        "second"));
  EXPECT_THAT(refused([](Options& options) { options.page_bytes = 2_MiB; }),
              HasSubstr("options.page_bytes: 2.0 MiB cannot be used"));
  EXPECT_THAT(refused([](Options& options) {
                options.offload.optimizer = Tier::kHost;
                options.offload.optimizer_bytes = 2_MiB;
                options.host_memory_bytes = 1_MiB;
              }),
              HasSubstr("options.offload.optimizer_bytes: 2.0 MiB cannot be used"));
  EXPECT_EQ(refused([](Options&) {}), "");
}

TEST(MemoryLimitsTest, NameTheOperatorsAndTheModulesWhoseActivationsAreHeld) {
  run_ranks(2, [](comm::World& world) {
    Model model(make_layers(), world, limited(1, 8 * kParameterBytes));
    // 3 layers of 2 MiB fit, and the fourth does not.
    const torch::Tensor rows = torch::ones({2048, kWidth});
    const std::string error = error_of([&] { model(rows); });
    EXPECT_THAT(error, HasSubstr("2.0 MiB of activation in forward (2: aten::matmul) would pass"));
    EXPECT_THAT(error,
                HasSubstr("activations are held by operators, the largest first:\n  "
                          "what no operator of a step made, such as the data: 2.0 MiB in 2\n  "
                          "0: aten::matmul in forward: 2.0 MiB in 1\n  "
                          "1: aten::matmul in forward: 2.0 MiB in 1\n"));
  });
}

// It is computed where the wrapper does not see it.
TEST(MemoryLimitsTest, TellTheLossFromForwardAndBackward) {
  run_ranks(2, [](comm::World& world) {
    Model model(make_layers(), world, limited(1, 8 * kParameterBytes));
    const torch::Tensor out = model(torch::ones({256, kWidth}));
    const std::string in_loss = error_of([&] { out.repeat({64, 1}).exp().sum().backward(); });
    EXPECT_THAT(in_loss,
                HasSubstr("MiB of activation_and_other between forward and backward, as of the "
                          "loss, (after 3: aten::repeat) would pass"));
    const torch::Tensor loss = out.exp().sum();
    const torch::Tensor rest = torch::empty(
        {8 * kParameterBytes - Ledger::current()->now().total() - 1_KiB}, torch::kByte);
    EXPECT_THAT(error_of([&] { loss.backward(); }),
                HasSubstr("in backward (ExpBackward0, after 3: aten::mul)"));
  });
}

// Its process may be gone before they notice, and they would hear of a lost rank.
TEST(MemoryLimitsTest, TellTheOtherRanksWhoRanOutOfMemoryAndHowMuchIsMissing) {
  const auto errors = testing::try_ranks(3, [](comm::World& world) {
    Model model(make_layers(), world, limited(1, 8 * kParameterBytes));
    Optimizer<torch::optim::AdamW> optimizer(model);
    model(torch::ones({world.rank() == 1 ? 3000 : 1, kWidth})).sum().backward();
    optimizer.step();
  });
  EXPECT_THAT(testing::message_of(errors[1]),
              HasSubstr("[rank 1/3] 2.9 MiB of activation in forward"));
  for (const size_t other : {0, 2}) {
    EXPECT_THAT(testing::message_of(errors[other]),
                AllOf(HasSubstr("rank 1 ran out of memory: 2.9 MiB of activation in forward (0: "
                                "aten::matmul) would pass the limit of device memory: "),
                      HasSubstr(" are missing"), Not(HasSubstr("lost rank")),
                      Not(HasSubstr("most is held by"))));
  }
}

// Who caught the error and went on has not failed of it.
TEST(MemoryLimitsTest, ForgetAShortageThatTheScriptHasCaught) {
  const auto errors = testing::try_ranks(2, [](comm::World& world) {
    Model model(make_layers(), world, limited(1, 8 * kParameterBytes));
    EXPECT_NE(error_of([&] { model(torch::ones({3000, kWidth})); }), "");
    EXPECT_NE(Ledger::current()->shortage(), "");
    model(torch::ones({1, kWidth})).sum().backward();
    EXPECT_EQ(Ledger::current()->shortage(), "");
    ZP_CHECK(world.rank() == 0, "something else");
    world.communicator().barrier("a wait").wait();
  });
  EXPECT_THAT(testing::message_of(errors[0]), Not(HasSubstr("ran out of memory")));
}

}  // namespace
}  // namespace zeropage::memory_limits_test

#include <atomic>
#include <mutex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/delays.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/activation_offload.h"
#include "zeropage/bytes.h"
#include "zeropage/ledger.h"

namespace zeropage::checkpointing::partitioned_checkpoints_test {
namespace {

using memory::Kind;
using memory::operator""_KiB;
using ::testing::HasSubstr;
using zeropage::testing::error_of;
using zeropage::testing::message_of;
using zeropage::testing::RankOptions;
using zeropage::testing::run_ranks;
using zeropage::testing::try_ranks;

bool all_of_them(const torch::Tensor&) {
  return true;
}

SliceGroup group_of(comm::World& world, std::atomic<int>* gathers = nullptr) {
  return {.index = world.rank(),
          .size = world.size(),
          .all_gather = [&world, gathers](const at::Tensor& whole, const std::string& name) {
            if (gathers != nullptr) ++*gathers;
            return world.communicator().all_gather(whole, name);
          }};
}

int64_t held(Kind kind) {
  return memory::Ledger::current()->now()[kind];
}

// Gathers begin late, each rank's by another time.
RankOptions late() {
  RankOptions options;
  options.decorate = [](std::unique_ptr<comm::Communicator> inner) {
    return std::make_unique<zeropage::testing::DelayedCommunicator>(std::move(inner),
                                                                    std::chrono::milliseconds(2));
  };
  return options;
}

struct Problem {
  std::shared_ptr<torch::nn::Module> module;
  std::function<torch::Tensor(const torch::Tensor&)> loss;
};

template <typename Module>
Problem make_problem() {
  // Modules draw from the one generator of the process, and ranks are threads of it.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(3);
  Module module;
  return {module.ptr(),
          [module](const torch::Tensor& x) mutable { return module->forward(x).pow(2).sum(); }};
}

torch::Tensor input() {
  return torch::linspace(-1, 1, 6 * 7).view({6, 7});
}

std::vector<torch::Tensor> gradients(const Problem& problem,
                                     const std::shared_ptr<SavedTensorHooks>& hooks) {
  torch::Tensor loss;
  {
    const SavedTensorScope scope(hooks);
    loss = problem.loss(input());
  }
  loss.backward();
  std::vector<torch::Tensor> found;
  for (const auto& parameter : problem.module->parameters()) {
    if (parameter.grad().defined()) found.push_back(parameter.grad().clone());
  }
  return found;
}

template <typename Module>
void expect_the_plain_bits(comm::World& world, std::shared_ptr<SavedTensorHooks> onward = nullptr) {
  const auto plain = gradients(make_problem<Module>(), nullptr);
  PartitionedCheckpoints partitioned({.group = group_of(world),
                                      .held_by_all = all_of_them,
                                      .least_bytes = 0,
                                      .verify = Verify::kEachTensor,
                                      .onward = std::move(onward)});
  const auto found = gradients(make_problem<Module>(), partitioned.hooks());
  ASSERT_EQ(found.size(), plain.size());
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(torch::equal(found[i], plain[i])) << i;
}

class PartitionedCheckpointsTest : public ::testing::TestWithParam<int> {};

TEST_P(PartitionedCheckpointsTest, GradientsHaveThePlainBits) {
  run_ranks(
      GetParam(),
      [](comm::World& world) {
        expect_the_plain_bits<zeropage::testing::ConvNet>(world);
        expect_the_plain_bits<zeropage::testing::Transformer>(world);
      },
      late());
}

TEST_P(PartitionedCheckpointsTest, ARankHoldsItsPartOfTheBytes) {
  run_ranks(GetParam(), [](comm::World& world) {
    PartitionedCheckpoints partitioned({.group = group_of(world), .held_by_all = all_of_them});
    const auto x = torch::ones({64, 1000}).requires_grad_();
    const int64_t before = memory::Ledger::current()->now().activations();
    torch::Tensor loss;
    {
      const ActivationScope scope(partitioned);
      loss = x.sin().sigmoid().tanh().sum();
    }
    // sin() saves x, a leaf that requires a gradient; sigmoid() and tanh() what they give.
    EXPECT_EQ(held(Kind::kActivation), 2 * 64 * 1000 * 4 / world.size());
    EXPECT_LE(memory::Ledger::current()->now().activations() - before,
              2 * 64 * 1000 * 4 / world.size() + 64);
    loss.backward();
    EXPECT_EQ(held(Kind::kActivation), 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, PartitionedCheckpointsTest, ::testing::Values(2, 4),
                         ::testing::PrintToStringParamName());

TEST(PartitionedGroupTest, SlicesMayGoOnToTheHost) {
  run_ranks(2, [](comm::World& world) {
    const ActivationOffload offload({.least_bytes = 0});
    expect_the_plain_bits<zeropage::testing::Transformer>(world, offload.hooks());
    EXPECT_GT(offload.statistics().fetched_bytes, 0);
    PartitionedCheckpoints partitioned(
        {.group = group_of(world), .held_by_all = all_of_them, .onward = offload.hooks()});
    const auto x = torch::ones({64, 1000}).requires_grad_();
    torch::Tensor loss;
    {
      const ActivationScope scope(partitioned);
      loss = x.sigmoid().tanh().sum();
    }
    EXPECT_EQ(held(Kind::kActivation), 0);
    EXPECT_EQ(held(Kind::kActivationOffloaded), 2 * 64 * 1000 * 4 / world.size());
    loss.backward();
    EXPECT_EQ(held(Kind::kActivationOffloaded), 0);
  });
}

TEST(PartitionedGroupTest, PartsOfOneBufferAreGatheredOnce) {
  std::atomic<int> gathers = 0;
  run_ranks(2, [&](comm::World& world) {
    PartitionedCheckpoints partitioned(
        {.group = group_of(world, &gathers), .held_by_all = all_of_them});
    const auto x = torch::ones({64, 300}).requires_grad_();
    torch::Tensor loss;
    {
      const ActivationScope scope(partitioned);
      const auto parts = (x * 2).chunk(3, 1);
      loss = (parts[0] * parts[1] * parts[2]).sum();
    }
    loss.backward();
    EXPECT_TRUE(torch::equal(x.grad(), torch::full({64, 300}, 8.0)));
  });
  // By each of two ranks: the buffer, and the product of two parts.
  EXPECT_EQ(gathers, 2 * 2);
}

TEST(PartitionedGroupTest, WhatIsNotHeldByAllStaysWhole) {
  std::atomic<int> gathers = 0;
  run_ranks(2, [&](comm::World& world) {
    PartitionedCheckpoints partitioned({.group = group_of(world, &gathers),
                                        .held_by_all = [](const torch::Tensor&) { return false; },
                                        .least_bytes = 0});
    const auto x = torch::full({64, 64}, world.rank() + 1.0).requires_grad_();
    torch::Tensor loss;
    {
      const ActivationScope scope(partitioned);
      loss = (x * 2).pow(2).sum();
    }
    loss.backward();
    EXPECT_TRUE(torch::equal(x.grad(), torch::full({64, 64}, 8.0 * (world.rank() + 1))));
  });
  EXPECT_EQ(gathers, 0);
}

TEST(PartitionedGroupTest, AWrongYesIsFoundByTheCheck) {
  const auto errors = try_ranks(2, [](comm::World& world) {
    PartitionedCheckpoints partitioned(
        {.group = group_of(world), .held_by_all = all_of_them, .verify = Verify::kEachTensor});
    const auto x = torch::full({64, 64}, world.rank() + 1.0).requires_grad_();
    const ActivationScope scope(partitioned);
    (x * 2).pow(2);
  });
  EXPECT_THAT(message_of(errors[0]),
              HasSubstr("to be the same on all 2 ranks of the group, but those of index 0 and 1"));
  EXPECT_THAT(message_of(errors[1]), HasSubstr("but those of index 1 and 0 differ"));
}

TEST(PartitionedGroupTest, AGatherThatFailsEndsBackward) {
  const SliceGroup group{
      .index = 1, .size = 2, .all_gather = [](const at::Tensor&, const std::string& name) {
        std::promise<void> failed;
        failed.set_exception(std::make_exception_ptr(std::runtime_error("lost while " + name)));
        return memory::Pending(failed.get_future().share(), {});
      }};
  PartitionedCheckpoints partitioned({.group = group, .held_by_all = all_of_them});
  const auto x = torch::ones({64, 64}).requires_grad_();
  torch::Tensor loss;
  {
    const ActivationScope scope(partitioned);
    loss = x.sigmoid().sum();
  }
  EXPECT_THAT(error_of([&] { loss.backward(); }),
              HasSubstr("lost while a saved tensor of sizes [64, 64]"));
}

TEST(PartitionedGroupTest, RefusesAGroupWithoutAGatherOrAPredicate) {
  EXPECT_THAT(error_of([] { PartitionedCheckpoints({.group = {.index = 2, .size = 2}}); }),
              HasSubstr("got index 2 of 2"));
  EXPECT_THAT(error_of([] { PartitionedCheckpoints({.group = {.index = 0, .size = 2}}); }),
              HasSubstr("needs both SliceGroup::all_gather and PartitionOptions::held_by_all"));
}

}  // namespace
}  // namespace zeropage::checkpointing::partitioned_checkpoints_test

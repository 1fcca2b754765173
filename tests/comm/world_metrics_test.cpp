// Sums and means over ranks for metrics.
#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/contributions.h"
#include "tests/harness/ranks.h"
#include "zeropage/simulation.h"
#include "zeropage/world.h"

namespace zeropage::comm::world_metrics_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::try_ranks;

TEST(WorldMetricsTest, NumbersAreReducedToTheSameBitsOnAllRanks) {
  for (const int size : {1, 2, 3, 7}) {
    std::vector<double> sums(static_cast<size_t>(size));
    run_ranks(size, [&](World& world) {
      const double own = 0.1 * (world.rank() + 1);
      const double sum = world.sum(own);
      EXPECT_NEAR(sum, 0.1 * size * (size + 1) / 2, 1e-12);
      EXPECT_EQ(world.mean(own), sum / size);
      EXPECT_EQ(world.min(own), 0.1);
      EXPECT_EQ(world.max(own), 0.1 * size);
      EXPECT_EQ(world.sum(1), size) << "a whole number is a number too";
      sums[static_cast<size_t>(world.rank())] = sum;
    });
    for (const double sum : sums) EXPECT_EQ(sum, sums[0]);
  }
}

TEST(WorldMetricsTest, ANanOnOneRankIsANanOnAll) {
  run_ranks(3, [](World& world) {
    const double own = world.rank() == 1 ? std::numeric_limits<double>::quiet_NaN() : 1.0;
    EXPECT_TRUE(std::isnan(world.sum(own)));
    EXPECT_TRUE(std::isnan(world.mean(own)));
    EXPECT_TRUE(std::isnan(world.min(own)));
    EXPECT_TRUE(std::isnan(world.max(own)));
  });
}

TEST(WorldMetricsTest, TensorsAreReducedIntoNewOnesOfTheirKind) {
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf,
                           torch::kLong, torch::kInt, torch::kByte}) {
    run_ranks(3, [dtype](World& world) {
      // Not contiguous: a confusion matrix, transposed.
      const auto own = torch::arange(6).view({2, 3}).t().add(world.rank()).to(dtype);
      const auto before = own.clone();
      const auto base = torch::arange(6).view({2, 3}).t();
      const auto sum = world.sum(own);
      EXPECT_EQ(sum.scalar_type(), dtype);
      EXPECT_EQ(sum.sizes(), own.sizes());
      EXPECT_TRUE(torch::equal(sum, base.mul(3).add(3).to(dtype)));
      EXPECT_TRUE(torch::equal(world.min(own), base.to(dtype)));
      EXPECT_TRUE(torch::equal(world.max(own), base.add(2).to(dtype)));
      if (own.is_floating_point()) {
        EXPECT_TRUE(torch::equal(world.mean(own), base.add(1).to(dtype)));
      }
      EXPECT_TRUE(torch::equal(own, before)) << "what was given stays";
    });
  }
}

TEST(WorldMetricsTest, ScalarsEmptyTensorsAndLossesWithAGraphAreTensorsToo) {
  run_ranks(2, [](World& world) {
    const auto weight = torch::full({}, 2.0, torch::requires_grad());
    const auto mean = world.mean(weight * (world.rank() + 1));
    EXPECT_EQ(mean.dim(), 0);
    EXPECT_EQ(mean.item<double>(), 3.0);
    EXPECT_FALSE(mean.requires_grad());
    EXPECT_EQ(world.sum(torch::zeros({0, 4})).sizes(), torch::IntArrayRef({0, 4}));
  });
}

TEST(WorldMetricsTest, ASimulatedWorldTakesTheOthersForThisRank) {
  const World world = World::simulated({.rank = 3, .topology = Topology::even(8, 4)});
  EXPECT_EQ(world.sum(1.5), 12.0);
  EXPECT_EQ(world.mean(1.5), 1.5);
  EXPECT_EQ(world.max(1.5), 1.5);
}

// What all ranks are told.
void expect_all_say(int size, const testing::RankFunction& calls,
                    const ::testing::Matcher<std::string>& words) {
  for (const auto& error : try_ranks(size, calls)) EXPECT_THAT(message_of(error), words);
}

TEST(WorldMetricsTest, RanksThatGiveOtherTensorsAreNamed) {
  expect_all_say(
      3, [](World& world) { world.sum(torch::ones({world.rank() == 2 ? 3 : 4})); },
      AllOf(HasSubstr("World::sum() differs between ranks"),
            HasSubstr("rank 0 has sizes: [4]; rank 2 has sizes: [3]")));
  expect_all_say(
      2,
      [](World& world) {
        world.mean(torch::ones({4}, world.rank() == 1 ? torch::kDouble : torch::kFloat));
      },
      HasSubstr("rank 0 has dtype: Float; rank 1 has dtype: Double"));
  expect_all_say(
      2, [](World& world) { world.max(world.rank() == 1 ? at::Tensor() : torch::ones({4})); },
      HasSubstr("rank 0 has sizes: [4]; rank 1 has sizes: undefined"));
}

TEST(WorldMetricsTest, WhatHasNoSumOrMeanIsRefusedInWords) {
  expect_all_say(
      2, [](World& world) { world.mean(torch::ones({4}, torch::kLong)); },
      HasSubstr("World::mean(): a mean of whole numbers would be cut off, got Long; convert it"));
  expect_all_say(
      2, [](World& world) { world.sum(torch::ones({4}, torch::kBool)); },
      HasSubstr("World::sum(): expected float, double"));
  expect_all_say(
      2, [](World& world) { world.sum(at::Tensor()); }, HasSubstr("got an undefined one"));
}

TEST(WorldMetricsTest, ARankThatCallsAloneIsToldOfTheOthersCall) {
  const auto errors = try_ranks(2, [](World& world) {
    if (world.rank() == 0) world.sum(1.0);
    world.mean(1.0);
  });
  EXPECT_THAT(message_of(errors[0]), AllOf(HasSubstr("World::sum()"), HasSubstr("out of step"),
                                           HasSubstr("World::mean()")));
  EXPECT_THAT(message_of(errors[1]), AllOf(HasSubstr("World::sum()"), HasSubstr("World::mean()")));
}

TEST(WorldMetricsTest, ARankThatDoesNotCallIsNamed) {
  const auto errors = try_ranks(2, [](World& world) {
    if (world.rank() == 0) world.sum(torch::ones({4}));
  });
  EXPECT_THAT(message_of(errors[0]), AllOf(HasSubstr("World::sum()"), HasSubstr("rank 1")));
}

}  // namespace
}  // namespace zeropage::comm::world_metrics_test

#include "pipeline/schedule/simulation.h"

#include <cmath>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zeropage/schedule.h"

namespace zeropage::pipeline::simulation_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Kind = parallel::ActionKind;

TEST(SimulationTest, AnActionBeginsWhenItsRankIsFreeAndItsMessageIsThere) {
  // Rank 1 takes twice as long, and a message half a second.
  const parallel::ActionLists lists = parallel::GPipe().actions(2, 2);
  const SimulatedStep step = simulate(lists, {{1, 1, 0}, {2, 1, 1}}, 0.5);
  EXPECT_THAT(step.timeline[0],
              ElementsAre(parallel::TimedAction{{Kind::kForward, 0, 0}, 0, 1},
                          parallel::TimedAction{{Kind::kForward, 0, 1}, 1, 2},
                          parallel::TimedAction{{Kind::kBackward, 0, 0}, 8, 9},
                          parallel::TimedAction{{Kind::kBackward, 0, 1}, 10, 11}));
  EXPECT_THAT(step.timeline[1],
              ElementsAre(parallel::TimedAction{{Kind::kForward, 0, 0}, 1.5, 3.5},
                          parallel::TimedAction{{Kind::kForward, 0, 1}, 3.5, 5.5},
                          parallel::TimedAction{{Kind::kBackward, 0, 0}, 5.5, 7.5},
                          parallel::TimedAction{{Kind::kBackward, 0, 1}, 7.5, 9.5}));
  EXPECT_EQ(step.makespan_s, 11);
  EXPECT_DOUBLE_EQ(step.bubble, 1 - 12.0 / 22);
}

TEST(SimulationTest, MessagesOfOneDirectionFollowEachOther) {
  // The second activation is sent at 0.2 and waits for the first, which is under way until 1.1.
  const SimulatedStep step =
      simulate(parallel::GPipe().actions(2, 2), {{0.1, 0.1, 0}, {0.1, 0.1, 0}}, 1);
  EXPECT_DOUBLE_EQ(step.timeline[1][0].begin_s, 1.1);
  EXPECT_DOUBLE_EQ(step.timeline[1][1].begin_s, 2.1);
}

TEST(SimulationTest, WhatStaysOnARankTakesNoTime) {
  const SimulatedStep step = simulate(parallel::Interleaved(2).actions(1, 1), {{1, 1, 1}}, 100);
  EXPECT_EQ(step.makespan_s, 6);
  EXPECT_EQ(step.bubble, 0);
}

TEST(SimulationTest, EveryActionMayHaveATimeOfItsOwn) {
  const SimulatedStep step = simulate(
      parallel::OneForwardOneBackward().actions(2, 2),
      [](int rank, const parallel::Action& action) {
        return action.kind == Kind::kForward && rank == 1 && action.micro_batch == 0 ? 5.0 : 1.0;
      });
  EXPECT_EQ(step.timeline[1][0].end_s, 6);
  EXPECT_EQ(step.makespan_s, 10);
}

TEST(SimulationTest, TimesThatAreNoneAreRefused) {
  const auto error_of = [](const std::vector<StageSeconds>& stages, double transfer_s) {
    try {
      simulate(parallel::GPipe().actions(2, 1), stages, transfer_s);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(error_of({{-1, 1, 1}}, 0),
              HasSubstr("the forward of micro-batch 0 of rank 0: expected seconds that are finite "
                        "and not negative, got -1"));
  EXPECT_THAT(error_of({{1, 1, 1}}, std::nan("")), HasSubstr("the transfer of a message"));
  EXPECT_THAT(error_of({{1, 1, 1}, {1, 1, 1}, {1, 1, 1}}, 0),
              HasSubstr("expected the seconds of one stage, or of each of 2, got 3"));
}

}  // namespace
}  // namespace zeropage::pipeline::simulation_test

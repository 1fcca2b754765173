#include "zeropage/schedule.h"

#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pipeline/schedule/order.h"
#include "pipeline/schedule/simulation.h"
#include "zeropage/schedule_fields.h"

namespace zeropage::pipeline::schedule_test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using Kind = parallel::ActionKind;

// A backward takes twice a forward, and its halves alike.
const std::vector<StageSeconds> kThirds{{1, 1, 1}};

std::string error_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

SimulatedStep simulated(parallel::ScheduleKind kind, int ranks, int micro_batches, int chunks = 1) {
  return simulate(parallel::make_schedule(kind, chunks)->actions(ranks, micro_batches), kThirds);
}

const parallel::ScheduleKind kOneChunk[] = {parallel::ScheduleKind::kGPipe,
                                            parallel::ScheduleKind::kOneForwardOneBackward,
                                            parallel::ScheduleKind::kZeroBubble};

TEST(ScheduleTest, EveryMicroBatchPassesEveryChunkOnceInAnOrderThatCanRun) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int micro_batches = 1; micro_batches <= 3 * ranks; ++micro_batches) {
      for (const parallel::ScheduleKind kind : kOneChunk) {
        if (kind != parallel::ScheduleKind::kGPipe && micro_batches < ranks) continue;
        SCOPED_TRACE(memory::text_of(kind) + ", " + std::to_string(ranks) + " ranks, " +
                     std::to_string(micro_batches) + " micro-batches");
        const auto schedule = parallel::make_schedule(kind);
        const parallel::ActionLists lists = schedule->actions(ranks, micro_batches);
        EXPECT_NO_THROW(check_order(lists));
        const size_t actions = schedule->splits_backward() ? 3 : 2;
        for (const auto& list : lists.of_rank) EXPECT_EQ(list.size(), actions * micro_batches);
      }
      for (int chunks = 2; chunks <= 4 && micro_batches % ranks == 0; ++chunks) {
        SCOPED_TRACE("interleaved, " + std::to_string(ranks) + " ranks, " +
                     std::to_string(micro_batches) + " micro-batches, " + std::to_string(chunks));
        const parallel::ActionLists lists =
            parallel::Interleaved(chunks).actions(ranks, micro_batches);
        EXPECT_NO_THROW(check_order(lists));
        for (const auto& list : lists.of_rank) EXPECT_EQ(list.size(), 2 * chunks * micro_batches);
      }
    }
  }
}

TEST(ScheduleTest, BubblesAreThoseOfThePapers) {
  for (const int ranks : {1, 2, 4, 8}) {
    for (const int groups : {1, 2, 4}) {
      const int micro_batches = groups * ranks;
      SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(micro_batches));
      // GPipe and 1F1B: Narayanan et al., 2021, section 2.2; interleaved: the same, section 2.2.2.
      const double whole = (ranks - 1.0) / (micro_batches + ranks - 1);
      EXPECT_NEAR(simulated(parallel::ScheduleKind::kGPipe, ranks, micro_batches).bubble, whole,
                  1e-12);
      EXPECT_NEAR(
          simulated(parallel::ScheduleKind::kOneForwardOneBackward, ranks, micro_batches).bubble,
          whole, 1e-12);
      for (const int chunks : {2, 4}) {
        EXPECT_NEAR(
            simulated(parallel::ScheduleKind::kInterleaved, ranks, micro_batches, chunks).bubble,
            (ranks - 1.0) / (chunks * micro_batches + ranks - 1), 1e-12);
      }
      // ZB-H1: (P - 1) (forward + input gradient - weight gradient) of idle time (Qi et al., 2023, table 2).
      EXPECT_NEAR(simulated(parallel::ScheduleKind::kZeroBubble, ranks, micro_batches).makespan_s,
                  3 * micro_batches + ranks - 1, 1e-12);
    }
  }
}

TEST(ScheduleTest, ActivationsAreHeldAsThePapersSay) {
  EXPECT_THAT(simulated(parallel::ScheduleKind::kGPipe, 4, 8).peak_activations,
              ElementsAre(8, 8, 8, 8));
  EXPECT_THAT(simulated(parallel::ScheduleKind::kOneForwardOneBackward, 4, 8).peak_activations,
              ElementsAre(4, 3, 2, 1));
  EXPECT_THAT(simulated(parallel::ScheduleKind::kZeroBubble, 4, 8).peak_activations,
              ElementsAre(4, 4, 4, 4));
  // P (1 + (P - 1) / (P V)), Narayanan et al., 2021, section 2.2.2, and less on later ranks.
  EXPECT_THAT(simulated(parallel::ScheduleKind::kInterleaved, 4, 8, 2).peak_activations,
              ElementsAre(5.5, 4.5, 3.5, 2.5));
}

TEST(ScheduleTest, ZeroBubbleIsAheadOf1f1bAndInterleavedBetweenThem) {
  const double one = simulated(parallel::ScheduleKind::kOneForwardOneBackward, 4, 8).makespan_s;
  // Each of two chunks takes half the time of a whole stage.
  const double interleaved =
      simulated(parallel::ScheduleKind::kInterleaved, 4, 8, 2).makespan_s / 2;
  const double zero_bubble = simulated(parallel::ScheduleKind::kZeroBubble, 4, 8).makespan_s;
  EXPECT_LT(interleaved, 0.9 * one);
  EXPECT_LT(zero_bubble, 0.85 * one);
  EXPECT_LT(zero_bubble, interleaved);
}

TEST(ScheduleTest, TheListsOfTwoRanksAreThoseOfTheFigures) {
  const auto actions = [](parallel::ScheduleKind kind, int rank) {
    std::string words;
    const parallel::ActionLists lists = parallel::make_schedule(kind)->actions(2, 3);
    for (const parallel::Action& action : lists.of_rank[rank]) {
      words += std::string(" ") + "FBIW"[static_cast<int>(action.kind)] +
               std::to_string(action.micro_batch);
    }
    return words;
  };
  EXPECT_EQ(actions(parallel::ScheduleKind::kGPipe, 0), " F0 F1 F2 B0 B1 B2");
  EXPECT_EQ(actions(parallel::ScheduleKind::kOneForwardOneBackward, 0), " F0 F1 B0 F2 B1 B2");
  EXPECT_EQ(actions(parallel::ScheduleKind::kOneForwardOneBackward, 1), " F0 B0 F1 B1 F2 B2");
  EXPECT_EQ(actions(parallel::ScheduleKind::kZeroBubble, 0), " F0 F1 I0 W0 F2 I1 W1 I2 W2");
  EXPECT_EQ(actions(parallel::ScheduleKind::kZeroBubble, 1), " F0 I0 F1 I1 W0 F2 I2 W1 W2");
}

TEST(ScheduleTest, WhatAScheduleCannotDoIsRefusedWithAWayOut) {
  EXPECT_THAT(error_of([] { parallel::OneForwardOneBackward().actions(4, 3); }),
              AllOf(HasSubstr("schedule 1f1b: expected at least 4 micro-batches"),
                    HasSubstr("got 3"), HasSubstr("take gpipe")));
  EXPECT_THAT(error_of([] { parallel::ZeroBubble().actions(4, 3); }),
              HasSubstr("schedule zero-bubble: expected at least 4 micro-batches"));
  EXPECT_THAT(error_of([] { parallel::Interleaved(2).actions(4, 6); }),
              AllOf(HasSubstr("schedule interleaved: expected micro-batches in groups of 4"),
                    HasSubstr("got 6"), HasSubstr("take a multiple, or 1f1b")));
  EXPECT_THAT(error_of([] { parallel::Interleaved(1); }),
              HasSubstr("expected at least 2 chunks of the model on each rank, got 1; with one "
                        "chunk take 1f1b"));
  EXPECT_THAT(error_of([] { parallel::make_schedule(parallel::ScheduleKind::kGPipe, 2); }),
              HasSubstr("schedule gpipe: expected 1 chunk of the model on each rank, got 2"));
  EXPECT_THAT(error_of([] { parallel::GPipe().actions(0, 3); }),
              HasSubstr("expected at least 1 rank"));
  EXPECT_THAT(error_of([] { parallel::GPipe().actions(2, 0); }),
              HasSubstr("expected at least 1 micro-batch, got 0"));
}

TEST(ScheduleTest, NamesAreTheWordsOfTheirKinds) {
  for (const auto& known : parallel::words_of(std::type_identity<parallel::ScheduleKind>())) {
    const int chunks = known.value == parallel::ScheduleKind::kInterleaved ? 2 : 1;
    EXPECT_EQ(parallel::make_schedule(known.value, chunks)->name(), known.word);
  }
}

}  // namespace
}  // namespace zeropage::pipeline::schedule_test

#include "pipeline/schedule/order.h"

#include <stdexcept>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zeropage/schedule.h"

namespace zeropage::pipeline::order_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Kind = parallel::ActionKind;

std::string error_in(const parallel::ActionLists& lists) {
  try {
    check_order(lists);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

// Two ranks, one micro-batch more than a list needs to be broken in.
parallel::ActionLists gpipe() {
  return parallel::GPipe().actions(2, 2);
}

TEST(OrderTest, ADeadlockIsNamedWithTheRanksAndTheActionsAroundTheCircle) {
  parallel::ActionLists lists = parallel::OneForwardOneBackward().actions(2, 2);
  // Rank 0 wants a gradient before it sends the activation for it.
  lists.of_rank[0] = {{Kind::kForward, 0, 1},
                      {Kind::kBackward, 0, 1},
                      {Kind::kForward, 0, 0},
                      {Kind::kBackward, 0, 0}};
  EXPECT_THAT(
      error_in(lists),
      testing::StrEq("deadlock: rank 0 of the pipeline waits in action 1 (backward of micro-batch "
                     "1) for what rank 1 sends in its action 3 (backward of micro-batch 1); rank 1 "
                     "of the pipeline waits in action 0 (forward of micro-batch 0) for what rank 0 "
                     "sends in its action 2 (forward of micro-batch 0)"));
}

TEST(OrderTest, MessagesOfOneKindAreReceivedInTheOrderOfSending) {
  parallel::ActionLists lists = gpipe();
  std::swap(lists.of_rank[1][0], lists.of_rank[1][1]);
  EXPECT_THAT(error_in(lists),
              AllOf(HasSubstr("rank 1 of the pipeline, action 0 (forward of micro-batch 1)"),
                    HasSubstr("its message comes behind that of micro-batch 0"),
                    HasSubstr("receive them in the order of sending")));
}

TEST(OrderTest, EveryMicroBatchGoesForwardsAndThenBackwardsOnce) {
  parallel::ActionLists twice = gpipe();
  twice.of_rank[0][1] = twice.of_rank[0][0];
  EXPECT_THAT(error_in(twice),
              HasSubstr("rank 0 of the pipeline, action 1 (forward of micro-batch 0): expected no "
                        "action before it, got its forward"));
  parallel::ActionLists backwards_first = gpipe();
  std::swap(backwards_first.of_rank[1][0], backwards_first.of_rank[1][2]);
  EXPECT_THAT(error_in(backwards_first),
              HasSubstr("action 0 (backward of micro-batch 0): expected its forward before it, "
                        "got no action"));
  parallel::ActionLists forgotten = gpipe();
  forgotten.of_rank[1].pop_back();
  EXPECT_THAT(error_in(forgotten),
              HasSubstr("rank 1 of the pipeline: expected a forward and a whole backward of "
                        "micro-batch 1, chunk 0, got its forward"));
  parallel::ActionLists no_weights = parallel::ZeroBubble().actions(2, 2);
  no_weights.of_rank[0].pop_back();
  EXPECT_THAT(error_in(no_weights), HasSubstr("got its input gradient"));
  parallel::ActionLists of_another = gpipe();
  of_another.of_rank[0][0].micro_batch = 2;
  EXPECT_THAT(error_in(of_another),
              HasSubstr("expected one of 2 micro-batches and of 1 chunks, got micro-batch 2"));
}

}  // namespace
}  // namespace zeropage::pipeline::order_test

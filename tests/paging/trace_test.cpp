#include "paging/trace.h"

#include <initializer_list>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace zeropage::paging::trace_test {
namespace {

using ::testing::ElementsAre;

void touch_all(Trace& trace, std::initializer_list<size_t> pages) {
  for (const size_t page : pages) trace.touch(page);
}

Trace recorded(std::initializer_list<size_t> pages) {
  Trace trace;
  touch_all(trace, pages);
  trace.end_pass();
  return trace;
}

TEST(TraceTest, KnowsNothingInItsFirstPass) {
  Trace trace;
  EXPECT_FALSE(trace.following());
  EXPECT_FALSE(trace.touch(3)) << "there is no plan to move along";
  EXPECT_FALSE(trace.touch(4));
  EXPECT_FALSE(trace.following());
}

TEST(TraceTest, PlansWhatTheFirstPassTouched) {
  const Trace trace = recorded({2, 0, 1, 0});
  EXPECT_TRUE(trace.following());
  EXPECT_THAT(trace.plan(), ElementsAre(2, 0, 1, 0));
  EXPECT_EQ(trace.next_position(), 0U);
}

TEST(TraceTest, MovesAlongThePlan) {
  Trace trace = recorded({2, 0, 1, 0});
  for (const size_t page : {2, 0, 1, 0}) EXPECT_TRUE(trace.touch(page));
  EXPECT_TRUE(trace.following());
  EXPECT_EQ(trace.next_position(), 4U);
  trace.end_pass();
  EXPECT_TRUE(trace.following());
  EXPECT_EQ(trace.next_position(), 0U);
  EXPECT_THAT(trace.plan(), ElementsAre(2, 0, 1, 0));
}

TEST(TraceTest, FindsThePositionOfAPagesNextUse) {
  Trace trace = recorded({2, 0, 1, 0});
  EXPECT_EQ(trace.next_use(2), 0U);
  EXPECT_EQ(trace.next_use(0), 1U);
  touch_all(trace, {2, 0});
  EXPECT_EQ(trace.next_use(0), 3U) << "the use at position 1 is the current one";
  EXPECT_EQ(trace.next_use(1), 2U);
  EXPECT_EQ(trace.next_use(2), Trace::kNever);
  EXPECT_EQ(trace.next_use(77), Trace::kNever) << "a page that the plan never had";
}

TEST(TraceTest, TakesRepeatedTouchesAsOne) {
  Trace trace = recorded({5, 5, 5, 6, 6, 5});
  EXPECT_THAT(trace.plan(), ElementsAre(5, 6, 5));
  EXPECT_TRUE(trace.touch(5));
  EXPECT_FALSE(trace.touch(5)) << "the same touch does not move on";
  EXPECT_EQ(trace.next_position(), 1U);
  EXPECT_TRUE(trace.touch(6));
  EXPECT_TRUE(trace.following());
}

TEST(TraceTest, BeginsAPassWithThePageThatEndedTheLast) {
  Trace trace = recorded({1, 2, 1});
  touch_all(trace, {1, 2, 1});
  trace.end_pass();
  EXPECT_TRUE(trace.touch(1));
  EXPECT_TRUE(trace.following());
  EXPECT_EQ(trace.next_position(), 1U);
}

TEST(TraceTest, DepartsOnceAndAdoptsTheNewOrder) {
  Trace trace = recorded({0, 1, 2});
  EXPECT_TRUE(trace.touch(0));
  EXPECT_TRUE(trace.touch(2)) << "away from the plan";
  EXPECT_FALSE(trace.following());
  EXPECT_FALSE(trace.touch(1)) << "nothing is known until the pass ends";
  EXPECT_FALSE(trace.following());
  trace.end_pass();
  EXPECT_TRUE(trace.following());
  EXPECT_THAT(trace.plan(), ElementsAre(0, 2, 1));
  EXPECT_EQ(trace.next_use(1), 2U);
}

TEST(TraceTest, DepartsWhenAPassIsLongerThanThePlan) {
  Trace trace = recorded({0, 1});
  touch_all(trace, {0, 1});
  EXPECT_TRUE(trace.following());
  EXPECT_TRUE(trace.touch(0));
  EXPECT_FALSE(trace.following());
  trace.end_pass();
  EXPECT_THAT(trace.plan(), ElementsAre(0, 1, 0));
}

TEST(TraceTest, AdoptsAShorterPass) {
  Trace trace = recorded({0, 1, 2, 3});
  touch_all(trace, {0, 1});
  trace.end_pass();
  EXPECT_TRUE(trace.following());
  EXPECT_THAT(trace.plan(), ElementsAre(0, 1));
  EXPECT_EQ(trace.next_use(3), Trace::kNever) << "uses of the old plan are gone";
}

TEST(TraceTest, KeepsThePlanOverAPassThatTouchedNothing) {
  Trace trace;
  trace.end_pass();
  EXPECT_FALSE(trace.following()) << "nothing is no plan";
  touch_all(trace, {0, 1});
  trace.end_pass();
  trace.end_pass();
  EXPECT_TRUE(trace.following());
  EXPECT_THAT(trace.plan(), ElementsAre(0, 1));
}

TEST(TraceTest, ForgetsTheBeginningOfAPassThatNobodyEnds) {
  constexpr size_t kMost = size_t{1} << 20;
  Trace trace = recorded({0, 1});
  for (size_t touch = 0; touch < 2 * kMost + 7; ++touch) trace.touch(touch % 3);
  EXPECT_FALSE(trace.following());
  trace.end_pass();
  EXPECT_EQ(trace.plan().size(), 7U) << "what came after the second time that it was full";
  EXPECT_EQ(trace.plan().front(), 2 * kMost % 3);
}

}  // namespace
}  // namespace zeropage::paging::trace_test

// The machine of a page's gradient: every move of its table, and no other.
#include "zero/gradients/page_gradient.h"

#include <algorithm>
#include <deque>
#include <map>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace zeropage::page_gradient_test {
namespace {

constexpr zero::GradientState kAll[] = {
    zero::GradientState::kCollecting, zero::GradientState::kReopened,
    zero::GradientState::kReducing, zero::GradientState::kReduced, zero::GradientState::kSummed};
static_assert(std::size(kAll) == zero::kGradientStateCount);

bool is_in_table(zero::GradientState from, zero::GradientState to) {
  return std::any_of(
      zero::kGradientMoves.begin(), zero::kGradientMoves.end(),
      [&](const zero::GradientMove& move) { return move.from == from && move.to == to; });
}

// A way to each state from the first one, by moves of the table.
std::map<zero::GradientState, std::vector<zero::GradientState>> ways() {
  std::map<zero::GradientState, std::vector<zero::GradientState>> found = {
      {zero::GradientState::kCollecting, {}}};
  std::deque<zero::GradientState> unread = {zero::GradientState::kCollecting};
  while (!unread.empty()) {
    const zero::GradientState from = unread.front();
    unread.pop_front();
    for (const zero::GradientMove& move : zero::kGradientMoves) {
      if (move.from != from || found.contains(move.to)) continue;
      found[move.to] = found[from];
      found[move.to].push_back(move.to);
      unread.push_back(move.to);
    }
  }
  return found;
}

TEST(GradientStateTest, EveryStateIsReached) {
  EXPECT_EQ(ways().size(), zero::kGradientStateCount);
}

TEST(GradientStateTest, GoesTheMovesOfItsTableAndRefusesAllOthers) {
  for (const auto& [from, way] : ways()) {
    for (const zero::GradientState to : kAll) {
      SCOPED_TRACE(::testing::Message() << name(from) << " to " << name(to));
      zero::GradientStateMachine machine;
      for (const zero::GradientState state : way) machine.move_to(state);
      ASSERT_EQ(machine.now(), from);
      if (is_in_table(from, to)) {
        machine.move_to(to);
        EXPECT_EQ(machine.now(), to);
      } else {
        EXPECT_THROW(machine.move_to(to), c10::Error);
        EXPECT_EQ(machine.now(), from) << "a move that is refused changes nothing";
      }
    }
  }
}

// A gradient that travels is closed before it is opened again, and what was averaged is kept apart from what comes.
TEST(GradientStateTest, HasNoWayAroundTheReductionOrTheReopening) {
  EXPECT_FALSE(is_in_table(zero::GradientState::kCollecting, zero::GradientState::kReduced));
  EXPECT_FALSE(is_in_table(zero::GradientState::kReopened, zero::GradientState::kReduced));
  EXPECT_FALSE(is_in_table(zero::GradientState::kReduced, zero::GradientState::kCollecting));
  EXPECT_FALSE(is_in_table(zero::GradientState::kReduced, zero::GradientState::kReducing));
  EXPECT_FALSE(is_in_table(zero::GradientState::kSummed, zero::GradientState::kReducing));
}

}  // namespace
}  // namespace zeropage::page_gradient_test

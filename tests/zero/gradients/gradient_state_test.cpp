// The machine of a page's gradient: every move of its table, and no other.
#include "zero/gradients/gradient_state.h"

#include <algorithm>
#include <deque>
#include <map>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace zeropage::gradient_state_test {
namespace {

constexpr GradientState kAll[] = {GradientState::kCollecting, GradientState::kReopened,
                                  GradientState::kReducing, GradientState::kReduced,
                                  GradientState::kSummed};
static_assert(std::size(kAll) == kGradientStateCount);

bool is_in_table(GradientState from, GradientState to) {
  return std::any_of(kGradientMoves.begin(), kGradientMoves.end(),
                     [&](const GradientMove& move) { return move.from == from && move.to == to; });
}

// A way to each state from the first one, by moves of the table.
std::map<GradientState, std::vector<GradientState>> ways() {
  std::map<GradientState, std::vector<GradientState>> found = {{GradientState::kCollecting, {}}};
  std::deque<GradientState> unread = {GradientState::kCollecting};
  while (!unread.empty()) {
    const GradientState from = unread.front();
    unread.pop_front();
    for (const GradientMove& move : kGradientMoves) {
      if (move.from != from || found.contains(move.to)) continue;
      found[move.to] = found[from];
      found[move.to].push_back(move.to);
      unread.push_back(move.to);
    }
  }
  return found;
}

TEST(GradientStateTest, EveryStateIsReached) {
  EXPECT_EQ(ways().size(), kGradientStateCount);
}

TEST(GradientStateTest, GoesTheMovesOfItsTableAndRefusesAllOthers) {
  for (const auto& [from, way] : ways()) {
    for (const GradientState to : kAll) {
      SCOPED_TRACE(::testing::Message() << name(from) << " to " << name(to));
      GradientStateMachine machine;
      for (const GradientState state : way) machine.move_to(state);
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
  EXPECT_FALSE(is_in_table(GradientState::kCollecting, GradientState::kReduced));
  EXPECT_FALSE(is_in_table(GradientState::kReopened, GradientState::kReduced));
  EXPECT_FALSE(is_in_table(GradientState::kReduced, GradientState::kCollecting));
  EXPECT_FALSE(is_in_table(GradientState::kReduced, GradientState::kReducing));
  EXPECT_FALSE(is_in_table(GradientState::kSummed, GradientState::kReducing));
}

}  // namespace
}  // namespace zeropage::gradient_state_test

// The machine of a page's gradient: every move of its table, and no other.
#include "zero/gradients/page_gradient.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
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

// What a page's gradient goes through, by what a script does.
TEST(GradientStateTest, HasTheMovesOfTheseStepsAndNoOthers) {
  using enum zero::GradientState;
  const std::vector<std::vector<zero::GradientState>> steps = {
      // Two backwards without zero_grad() between them, and gradients that are dropped.
      {kCollecting, kReducing, kReduced, kReopened, kReducing, kReduced, kReduced},
      // Backwards under no_sync(), without and with a mean from before; then one that averages.
      {kCollecting, kCollecting, kReducing},
      {kReduced, kReopened, kCollecting, kReducing},
      // The micro-batches of a step, and its end.
      {kCollecting, kReducing, kSummed, kReopened, kReducing, kSummed, kReduced},
      // A backward that threw while its buckets travelled.
      {kReducing, kCollecting}};
  std::set<std::pair<std::string, std::string>> made, table;
  for (const auto& step : steps) {
    for (size_t i = 0; i + 1 < step.size(); ++i) made.emplace(name(step[i]), name(step[i + 1]));
  }
  for (const zero::GradientMove& move : zero::kGradientMoves) {
    table.emplace(name(move.from), name(move.to));
  }
  EXPECT_EQ(table, made);
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

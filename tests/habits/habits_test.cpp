// The table in docs/habits.md is that of the habits.
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include <gtest/gtest.h>

#include "tests/habits/habit.h"

namespace zeropage::habits_test {
namespace {

using namespace zeropage::testing;

std::string table() {
  std::map<std::string, std::vector<const Habit*>> by_group;
  for (const Habit& habit : habits()) by_group[habit.group].push_back(&habit);
  std::ostringstream out;
  out << "# Habits: what is right, what is refused\n\n"
         "Each row of these tables is a test in `tests/habits/`. It runs what a training script "
         "does over stages,\nprecisions, offload and recompute, on 1 to 4 ranks.\n\n"
         "*Right* means that the run ends with the values that LibTorch alone gives for the mean "
         "of the ranks' losses.\n*Refused* means that the line which does it throws; the table "
         "says what to do instead.\n\n"
         "The tests write this file: "
         "`ZEROPAGE_WRITE_TABLES=1 build/release/tests/habits_test`.\n";
  for (const auto& [group, of_group] : by_group) {
    out << "\n## " << group << "\n\n| what a script does | what happens |\n|---|---|\n";
    for (const Habit* habit : of_group) {
      out << "| " << habit->does << " | "
          << (habit->instead.empty() ? "right" : "refused: " + habit->instead) << " |\n";
    }
  }
  return out.str();
}

TEST(HabitsTableTest, IsWhatTheSuiteRuns) {
  const std::string path = ZEROPAGE_SOURCE_DIR "/docs/habits.md";
  if (std::getenv("ZEROPAGE_WRITE_TABLES") != nullptr) std::ofstream(path) << table();
  std::ifstream file(path);
  std::ostringstream written;
  written << file.rdbuf();
  EXPECT_EQ(written.str(), table())
      << "run this test with ZEROPAGE_WRITE_TABLES=1 and commit docs/habits.md";
}

}  // namespace
}  // namespace zeropage::habits_test

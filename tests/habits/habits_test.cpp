// The table in zero/HABITS.md is that of the habits.
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
  out << "# Habits\n\n"
      << "What training scripts do, as `tests/habits/` runs it over stages, precisions, offload "
         "and "
         "recompute on 1 to 3 ranks: right means the\nvalues of LibTorch alone on the mean of the "
         "ranks' losses; what is refused is refused at the line that does it. This table is made "
         "of "
         "the tests.\n";
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
  const std::string path = ZEROPAGE_SOURCE_DIR "/zero/HABITS.md";
  if (std::getenv("ZEROPAGE_WRITE_TABLES") != nullptr) std::ofstream(path) << table();
  std::ifstream file(path);
  std::ostringstream written;
  written << file.rdbuf();
  EXPECT_EQ(written.str(), table())
      << "run this test with ZEROPAGE_WRITE_TABLES=1 and commit zero/HABITS.md";
}

}  // namespace
}  // namespace zeropage::habits_test

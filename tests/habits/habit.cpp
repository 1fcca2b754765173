#include "tests/habits/habit.h"

#include <algorithm>
#include <cctype>

#include <gtest/gtest.h>

namespace zeropage::testing {
namespace {

std::deque<Habit>& all() {
  static std::deque<Habit> habits;
  return habits;
}

class HabitTest : public ::testing::Test {
 public:
  explicit HabitTest(const Habit& habit) : habit_(habit) {}
  void TestBody() override { habit_.check(); }

 private:
  const Habit& habit_;
};

// "Two optimizers on one model" as a name of a test.
std::string test_name(const std::string& words) {
  std::string name;
  bool begins = true;
  for (const char c : words) {
    const bool is_letter = std::isalnum(static_cast<unsigned char>(c)) != 0;
    if (is_letter) {
      name += begins ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
    }
    begins = !is_letter;
  }
  return name;
}

}  // namespace

const std::deque<Habit>& habits() {
  return all();
}

int add_habit(Habit habit) {
  const Habit& added = all().emplace_back(std::move(habit));
  ::testing::RegisterTest("HabitsTest", test_name(added.does).c_str(), nullptr, nullptr, __FILE__,
                          __LINE__, [&added]() -> HabitTest* { return new HabitTest(added); });
  return static_cast<int>(all().size());
}

std::vector<Setting> settings_over(Over over) {
  std::vector<Setting> settings;
  for (const int stage : {0, 1, 2, 3}) settings.push_back({.stage = stage});
  for (const int ranks : {1, 3}) {
    for (const int stage : {0, 3}) settings.push_back({.stage = stage, .ranks = ranks});
  }
  if (over == Over::kFp32) return settings;
  for (const Mode mode : {Mode::kBf16, Mode::kAutocast, Mode::kHostOffload, Mode::kRecompute}) {
    if (over == Over::kNotAutocast && mode == Mode::kAutocast) continue;
    for (const int stage : {1, 3}) settings.push_back({.stage = stage, .mode = mode});
  }
  settings.push_back({.stage = 3, .mode = Mode::kHeldPages});
  settings.push_back({.stage = 3, .mode = Mode::kSecondaryShards, .ranks = 4});
  return settings;
}

Mode plain_mode(Mode mode) {
  return mode == Mode::kBf16 || mode == Mode::kAutocast ? mode : Mode::kFp32;
}

void expect_alike(const std::vector<Values>& expected, const std::vector<Values>& actual,
                  const Setting& setting, double tolerance) {
  if (setting.mode == Mode::kHostOffload) tolerance = std::max(tolerance, 2e-5);
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    ASSERT_EQ(expected[rank].size(), actual[rank].size()) << "rank " << rank;
    for (size_t i = 0; i < expected[rank].size(); ++i) {
      const torch::Tensor& right = expected[rank][i];
      const torch::Tensor& ours = actual[rank][i];
      ASSERT_EQ(right.sizes(), ours.sizes()) << "rank " << rank << ", value " << i;
      ASSERT_EQ(right.scalar_type(), ours.scalar_type()) << "rank " << rank << ", value " << i;
      const bool same = tolerance == 0 ? torch::equal(right, ours)
                                       : torch::allclose(right, ours, tolerance, tolerance);
      EXPECT_TRUE(same)
          << "rank " << rank << ", value " << i << " of sizes " << right.sizes()
          << " differs by up to "
          << (right.to(torch::kDouble) - ours.to(torch::kDouble)).abs().max().item<double>();
    }
  }
}

}  // namespace zeropage::testing

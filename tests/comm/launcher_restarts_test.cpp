// Ranks that a launcher starts again, of programs that know nothing of it.
#include <atomic>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/launcher/copies_folder.h"
#include "comm/launcher/generations.h"
#include "tests/comm/launched_process.h"
#include "zeropage/launcher.h"

namespace zeropage::comm::launcher_restarts_test {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::Not;

// A folder that ends with the test, in which ranks leave files: $HERE.
class LauncherRestartsTest : public testing::Test {
 protected:
  LauncherRestartsTest() {
    std::string name = testing::TempDir() + "zeropage_restarts_XXXXXX";
    folder_ = ::mkdtemp(name.data());
    ::setenv("HERE", folder_.c_str(), 1);
  }
  ~LauncherRestartsTest() override { std::filesystem::remove_all(folder_); }

  std::function<int()> shell(const std::string& script, int ranks, int restarts,
                             milliseconds grace = milliseconds(5000)) const {
    const LaunchOptions options{
        .ranks = ranks, .grace = grace, .restarts = restarts, .copies_in = folder_};
    return [=] { return launch_program({"/bin/sh", "-c", script}, options); };
  }
  const std::string& folder() const { return folder_; }

 private:
  std::string folder_;
};

// The first time alone, of all that run it.
const std::string kOnce = "mkdir $HERE/once 2>/dev/null && ";

TEST_F(LauncherRestartsTest, ARankThatFailedIsStartedAgain) {
  LaunchedProcess launch(shell("[ $RANK = 1 ] && " + kOnce + "exit 3; sleep 0.5; echo done", 2, 2));
  EXPECT_EQ(launch.wait(), 0);
  EXPECT_THAT(launch.out(), HasSubstr("[rank 1] done"));
  EXPECT_THAT(launch.err(), HasSubstr("rank 1 exited with code 3: start 1 of 2 of all ranks"));
}

TEST_F(LauncherRestartsTest, RanksThatEndBecauseOfAnotherAreStartedAgainWithIt) {
  // Rank 0 notices a little later, as a rank that has lost another does.
  LaunchedProcess launch(
      shell("echo $MASTER_PORT >> $HERE/ports; " + kOnce +
                "kill -9 $$; [ $(wc -l < $HERE/ports) -lt 3 ] && sleep 0.3 && exit 1; echo done",
            2, 1));
  EXPECT_EQ(launch.wait(), 0) << launch.err();
  EXPECT_THAT(launch.out(), HasSubstr("[rank 0] done"));
  EXPECT_THAT(launch.out(), HasSubstr("[rank 1] done"));
  EXPECT_THAT(launch.err(), HasSubstr("was killed by signal 9: start 1 of 1 of all ranks"));
}

TEST_F(LauncherRestartsTest, ARankThatStaysIsKilledAfterTheGrace) {
  LaunchedProcess launch(shell("[ $RANK = 1 ] && " + kOnce +
                                   "exit 3; [ $RANK = 0 ] && mkdir $HERE/stay 2>/dev/null && "
                                   "sleep 30; echo done",
                               2, 1, milliseconds(300)));
  EXPECT_EQ(launch.wait(), 0) << launch.err();
  EXPECT_LT(launch.seconds(), 10);
  EXPECT_THAT(launch.err(),
              HasSubstr("rank 0 did not leave its loop within 0.3 s: sending SIGKILL"));
}

TEST_F(LauncherRestartsTest, ARankThatAlwaysFailsEndsTheLaunchWithItsCode) {
  LaunchedProcess launch(shell("[ $RANK = 1 ] && exit 3; sleep 30", 2, 2, milliseconds(200)));
  EXPECT_EQ(launch.wait(), 3);
  EXPECT_THAT(launch.err(), HasSubstr("start 2 of 2 of all ranks"));
  EXPECT_THAT(launch.err(), HasSubstr("rank 1 (pid "));
}

TEST_F(LauncherRestartsTest, NothingIsStartedAgainWhenAnotherRankHasFinished) {
  LaunchedProcess launch(shell("[ $RANK = 1 ] && sleep 0.5 && exit 3; exit 0", 2, 5));
  EXPECT_EQ(launch.wait(), 3);
  EXPECT_THAT(launch.err(), Not(HasSubstr("start 1 of 5")));
}

TEST_F(LauncherRestartsTest, ASignalToTheLauncherEndsAllRanks) {
  LaunchedProcess launch(shell("echo up; sleep 30", 2, 5));
  EXPECT_TRUE(launch.prints("[rank 1] up"));
  EXPECT_TRUE(launch.prints("[rank 0] up"));
  launch.signal(SIGTERM);
  EXPECT_EQ(launch.wait(), 128 + SIGTERM);
  EXPECT_THAT(launch.err(), Not(HasSubstr("start 1 of 5")));
}

TEST_F(LauncherRestartsTest, RefusesWhatCannotBe) {
  LaunchOptions options{.restarts = -1};
  EXPECT_THROW(launch_program({"true"}, options), std::invalid_argument);
  options.restarts = 1001;
  EXPECT_THROW(launch_program({"true"}, options), std::invalid_argument);
  options = {.restarts = 1, .copies_in = "/nowhere/at/all"};
  EXPECT_THROW(launch_program({"true"}, options), std::system_error);
}

TEST(GenerationsTest, ARankFindsWhatItsLauncherWrote) {
  detail::Generations launcher = detail::Generations::create(2, 3, 4711);
  detail::Generations rank = detail::Generations::open(launcher.path());
  EXPECT_EQ(rank.current(), 0);
  EXPECT_EQ(rank.begin_of(0).port, 4711);
  rank.join(1, 0);
  rank.leave(1, 0, 0);
  EXPECT_EQ(launcher.joined(1), 0);
  EXPECT_EQ(launcher.left(1), 0);
  EXPECT_EQ(launcher.left(0), -1);
  EXPECT_EQ(launcher.blamed(1), 0);
  EXPECT_EQ(launcher.blamed(0), -1);
  launcher.begin({.cause = detail::BeginCause::kSignal, .detail = 9, .rank = 1, .port = 4712});
  EXPECT_EQ(rank.current(), 1);
  EXPECT_EQ(rank.begin_of(1).words(), "rank 1 was killed by signal 9");
  rank.note_resume(1, 40);
  EXPECT_EQ(launcher.begin_of(1).resumed_step, 40);
  launcher.close();
  EXPECT_TRUE(rank.is_closed());
}

TEST(GenerationsTest, RefusesWhatNoLauncherWrote) {
  EXPECT_THROW(detail::Generations::open("/nowhere"), std::runtime_error);
  EXPECT_THROW(detail::Generations::open("/proc/self/exe"), std::runtime_error);
}

// Each looks for what killed launchers have left, and must not take another's new folder for that.
TEST_F(LauncherRestartsTest, LaunchersThatStartTogetherLeaveEachOthersCopies) {
  constexpr int kLaunchers = 4;
  constexpr int kStarts = 500;
  std::atomic<int> removed{0};
  {
    std::vector<std::jthread> launchers;
    for (int launcher = 0; launcher < kLaunchers; ++launcher) {
      launchers.emplace_back([&] {
        for (int start = 0; start < kStarts; ++start) {
          const detail::CopiesFolder copies(folder());
          std::this_thread::yield();
          if (!std::filesystem::exists(copies.path() / "lock")) ++removed;
        }
      });
    }
  }
  EXPECT_EQ(removed, 0);
}

}  // namespace
}  // namespace zeropage::comm::launcher_restarts_test

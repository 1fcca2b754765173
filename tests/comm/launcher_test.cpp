#include "zeropage/launcher.h"

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "device/accelerator_driver.h"
#include "tests/comm/launched_process.h"

namespace zeropage::comm::launcher_test {
namespace {

using std::chrono::milliseconds;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

constexpr double kMargin =
    5;  // seconds a loaded machine may add; what is not ended sleeps for longer
const std::string kRankOne = "[ $RANK = 1 ] && ";

LaunchOptions ranks(int count, milliseconds grace = milliseconds(200)) {
  LaunchOptions options;
  options.ranks = count;
  options.grace = grace;
  return options;
}

std::function<int()> shell(const std::string& script, const LaunchOptions& options) {
  return [=] { return launch_program({"/bin/sh", "-c", script}, options); };
}

std::function<int()> function(const std::function<int()>& body, const LaunchOptions& options) {
  return [=] { return launch_function(body, options); };
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

TEST(LauncherTest, ReturnsZeroInSilenceWhenEveryRankSucceeds) {
  LaunchedProcess launch(shell("exit 0", ranks(3)));
  EXPECT_EQ(launch.wait(), 0);
  EXPECT_EQ(launch.out() + launch.err(), "");
}

TEST(LauncherTest, GivesEachRankItsVariablesInPlaceOfInheritedOnes) {
  LaunchedProcess launch([] {
    ::setenv("RANK", "77", 1);
    ::setenv("SLURM_PROCID", "5", 1);
    return shell(
        "echo r=$RANK/$WORLD_SIZE l=$LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR s=$SLURM_PROCID;"
        "[ $ZEROPAGE_LAUNCHER = $PPID ] && [ $MASTER_PORT -gt 0 ] && echo port=$MASTER_PORT",
        ranks(2))();
  });
  EXPECT_EQ(launch.wait(), 0);
  EXPECT_THAT(launch.out(), HasSubstr("[rank 0] r=0/2 l=0/2 127.0.0.1 s=5\n"));
  EXPECT_THAT(launch.out(), HasSubstr("[rank 1] r=1/2 l=1/2 127.0.0.1 s=5\n"));
  const std::string port = "port=" + std::to_string(launch.printed_number("port")) + "\n";
  EXPECT_THAT(launch.out(), HasSubstr("[rank 0] " + port));
  EXPECT_THAT(launch.out(), HasSubstr("[rank 1] " + port));
}

TEST(LauncherTest, LeavesNoSecondCopyOfAVariable) {
  // A shell would show the last copy, getenv the first.
  LaunchedProcess launch([] {
    ::setenv("RANK", "77", 1);
    return launch_program({"env"}, ranks(1));
  });
  EXPECT_EQ(launch.wait(), 0);
  EXPECT_THAT(launch.out(), HasSubstr("[rank 0] RANK=0\n"));
  EXPECT_THAT(launch.out(), Not(HasSubstr("RANK=77")));
}

TEST(LauncherTest, PrefixesWholeLinesOfBothStreamsAndNeverMixesThem) {
  const std::string line(700, 'x');
  LaunchedProcess launch(shell("i=0; while [ $i -lt 300 ]; do i=$((i+1)); printf " +
                                   line.substr(0, 350) + "; echo " + line.substr(350) +
                                   "; done; echo e$RANK >&2",
                               ranks(3)));
  EXPECT_EQ(launch.wait(), 0);
  std::istringstream lines(launch.out());
  std::vector<int> count(3);
  for (std::string text; std::getline(lines, text);) {
    ASSERT_EQ(text.substr(0, 6) + text.substr(7), "[rank ] " + line);
    ++count.at(text[6] - '0');
  }
  EXPECT_THAT(count, testing::Each(300));
  EXPECT_THAT(launch.err(), HasSubstr("[rank 2] e2\n"));
}

TEST(LauncherTest, TakesProgressPiecesAndAnUnfinishedLastLineAsLines) {
  LaunchedProcess launch(shell(R"(printf '\r10%%\r20%%\r\nline\r'; printf '\n\nlast')", ranks(1)));
  EXPECT_EQ(launch.wait(), 0);
  EXPECT_EQ(launch.out(), "[rank 0] 10%\n[rank 0] 20%\n[rank 0] line\n[rank 0] \n[rank 0] last\n");
}

TEST(LauncherTest, LeavesOurStreamsToRankZeroWhenAsked) {
  LaunchOptions options = ranks(2);
  options.output = LaunchOptions::Output::kRankZeroBare;
  LaunchedProcess launch(shell("printf \"o$RANK\\r\"; printf e$RANK >&2", options));
  EXPECT_EQ(launch.wait(), 0);
  EXPECT_THAT(launch.out(), HasSubstr("o0\r"));
  EXPECT_THAT(launch.out(), Not(HasSubstr("[rank 0]")));
  EXPECT_THAT(launch.out(), HasSubstr("[rank 1] o1\n"));
  EXPECT_THAT(launch.err(), HasSubstr("[rank 1] e1\n"));
}

TEST(LauncherTest, PassesTheExitCodeOnAndEndsTheSurvivors) {
  LaunchedProcess launch(shell(kRankOne + "exit 3; echo pid=$$; exec sleep 100", ranks(2)));
  EXPECT_EQ(launch.wait(), 3);
  EXPECT_GE(launch.seconds(), 0.2);
  EXPECT_LT(launch.seconds(), 0.2 + kMargin);
  EXPECT_THAT(launch.err(), ContainsRegex("zeropage: rank 1 \\(pid [0-9]+\\) exited with code 3\n"
                                          "zeropage: rank 1 printed nothing\n"));
  EXPECT_THAT(launch.err(), HasSubstr("rank 0 still running 0.2 s after rank 1 failed"));
  EXPECT_FALSE(is_running(launch.printed_number("pid")));
}

TEST(LauncherTest, KillsSurvivorsThatIgnoreSigterm) {
  LaunchedProcess launch(shell("trap '' TERM; " + kRankOne + "exit 3; while :; do sleep 9; done",
                               ranks(2, milliseconds(0))));
  EXPECT_EQ(launch.wait(), 3);
  EXPECT_GE(launch.seconds(), 1.0);
  EXPECT_THAT(launch.err(), HasSubstr("rank 0 did not end in time: sending SIGKILL"));
}

TEST(LauncherTest, ReportsTheSignalThatKilledTheFirstRank) {
  // Rank 0 fails as a consequence, as a rank does that loses its peer.
  LaunchedProcess launch(shell("[ $RANK = 2 ] && kill -9 $$; sleep 0.1; exit 1", ranks(3)));
  EXPECT_EQ(launch.wait(), 128 + SIGKILL);
  EXPECT_THAT(launch.err(), ContainsRegex("rank 2 \\(pid [0-9]+\\) was killed by SIGKILL\n"));
  EXPECT_THAT(launch.err(), Not(HasSubstr("exited with code")));
}

TEST(LauncherTest, BlamesTheRankThatWasKilledNotThePeerThatEndedAMomentBefore) {
  LaunchedProcess launch(shell(kRankOne + "exit 1; sleep 0.1; kill -KILL $$", ranks(2)));
  EXPECT_EQ(launch.wait(), 128 + SIGKILL);
  EXPECT_THAT(launch.err(), HasSubstr("rank 0 (pid "));
}

TEST(LauncherTest, BlamesTheFirstFailureForAnAbortThatFollows) {
  LaunchedProcess launch(shell(kRankOne + "exit 3; sleep 0.1; kill -ABRT $$", ranks(2)));
  EXPECT_EQ(launch.wait(), 3);
  EXPECT_THAT(launch.err(), HasSubstr("rank 1 (pid "));
}

TEST(LauncherTest, LetsSurvivorsEndByThemselvesWithinTheGrace) {
  LaunchedProcess launch(shell(
      "trap 'echo signalled' TERM; " + kRankOne + "exit 3; sleep 0.3; echo ended alone; exit 4",
      ranks(2, milliseconds(60'000))));
  EXPECT_EQ(launch.wait(), 3);
  EXPECT_LT(launch.seconds(), 0.3 + kMargin);
  EXPECT_EQ(launch.out(), "[rank 0] ended alone\n");
}

TEST(LauncherTest, RepeatsTheLastLinesOfTheCulpritOnly) {
  LaunchOptions options = ranks(2);
  options.tail_lines = 3;
  LaunchedProcess launch(
      shell("[ $RANK = 0 ] && { echo fine; exit 0; }; seq 1 8; sleep 0.1; echo why >&2; exit 5",
            options));
  EXPECT_EQ(launch.wait(), 5);
  EXPECT_THAT(launch.err(), HasSubstr("last lines of rank 1:\n  | 7\n  | 8\n  | why\n"));
  EXPECT_THAT(launch.err(), Not(HasSubstr("| 6")));
  EXPECT_THAT(launch.err(), Not(HasSubstr("| fine")));
}

// What one of two ranks says when it loses the other, as Zeropage's errors do.
const std::string kLost =
    "echo '[rank 0/2] all_gather #3 of page \"a\": lost rank 1: an exception ended it' >&2; exit 1";

TEST(LauncherTest, ShowsTheRefusalThatEndedTheOthersFirstAndLast) {
  LaunchedProcess launch(
      shell(kRankOne + "{ sleep 0.3; echo 'no file a' >&2; sleep 0.2; exit 5; }; " + kLost,
            ranks(2, milliseconds(3000))));
  EXPECT_EQ(launch.wait(), 5);
  EXPECT_THAT(launch.err(),
              testing::StartsWith("[rank 1] no file a\n[rank 0] [rank 0/2] all_gather"));
  EXPECT_THAT(launch.err(), ContainsRegex("zeropage: rank 1 \\(pid [0-9]+\\) exited with code 5\n"
                                          "zeropage: last lines of rank 1:\n  \\| no file a\n$"));
}

TEST(LauncherTest, FollowsRanksThatBlameEachOtherToTheOneThatBlamesNobody) {
  LaunchedProcess launch(shell(
      "case $RANK in 0) echo '[rank 0/3] broadcast #1: lost rank 1 (process 7)' >&2; exit 1;; "
      "1) sleep 0.1; echo '[rank 1/3] broadcast #1: rank 2 ran out of memory: 4 MiB' >&2; exit 1;; "
      "2) sleep 0.2; echo '[rank 2/3] 4 MiB would pass the limit' >&2; exit 6;; esac",
      ranks(3, milliseconds(3000))));
  EXPECT_EQ(launch.wait(), 6);
  EXPECT_THAT(launch.err(), testing::StartsWith("[rank 2] "));
  EXPECT_THAT(launch.err(), testing::EndsWith("  | [rank 2/3] 4 MiB would pass the limit\n"));
}

// It may have ended in good order, or hang on.
TEST(LauncherTest, BlamesTheRankThatFailedWhereTheOneThatItLostDidNot) {
  LaunchedProcess in_order(shell(kRankOne + "exit 0; " + kLost, ranks(2)));
  EXPECT_EQ(in_order.wait(), 1);
  EXPECT_THAT(in_order.err(), HasSubstr("zeropage: rank 0 (pid "));
  LaunchedProcess hangs(shell(kRankOne + "exec sleep 100; " + kLost, ranks(2, milliseconds(1500))));
  EXPECT_EQ(hangs.wait(), 1);
  EXPECT_LT(hangs.seconds(), 1.5 + kMargin);
  const std::string said = hangs.err();
  EXPECT_THAT(said, HasSubstr("zeropage: rank 0 (pid "));
  // Its words are not held back until the end.
  EXPECT_LT(said.find("[rank 0] [rank 0/2]"), said.find("rank 1 still running")) << said;
}

TEST(LauncherTest, LeavesLibTorchsStacksOutUnlessTheyAreAskedFor) {
  const std::string throws =
      "{ echo; echo '  what():  shapes differ'; "
      "echo 'Exception raised from meta at LinearAlgebra.cpp:195 (most recent call first):'; "
      "echo 'frame #0: c10::Error'; echo 'frame #1: <unknown function> + 0x5'; echo; "
      "echo 'frame #2 of the film'; } >&2; exit 1";
  LaunchedProcess launch(shell(throws, ranks(1)));
  EXPECT_EQ(launch.wait(), 1);
  EXPECT_THAT(launch.err(),
              HasSubstr("zeropage: left out 4 lines of LibTorch's stack; "
                        "TORCH_SHOW_CPP_STACKTRACES=1 shows them\n"
                        "zeropage: last lines of rank 0:\n  | \n  |   what():  shapes differ\n"
                        "  | frame #2 of the film\n"));
  EXPECT_THAT(launch.err(), Not(HasSubstr("frame #0")));
  LaunchedProcess asked([&] {
    ::setenv("TORCH_SHOW_CPP_STACKTRACES", "1", 1);
    return shell(throws, ranks(1))();
  });
  EXPECT_EQ(asked.wait(), 1);
  EXPECT_THAT(asked.err(), HasSubstr("[rank 0] frame #1: <unknown function> + 0x5\n"));
  EXPECT_THAT(asked.err(), Not(HasSubstr("left out")));
}

TEST(LauncherTest, PassesSigtermOnAndReturnsItsCode) {
  LaunchedProcess launch(shell("trap 'echo saved; exit 0' TERM; echo ready $RANK; sleep 100 & wait",
                               ranks(2, milliseconds(2000))));
  ASSERT_TRUE(launch.prints("ready 0") && launch.prints("ready 1"));
  launch.signal(SIGTERM);
  EXPECT_EQ(launch.wait(), 128 + SIGTERM);
  EXPECT_LT(launch.seconds(), kMargin);
  EXPECT_THAT(launch.out(), HasSubstr("[rank 0] saved"));
  EXPECT_THAT(launch.out(), HasSubstr("[rank 1] saved"));
  EXPECT_THAT(launch.err(), HasSubstr("received SIGTERM, passed on to ranks 0, 1"));
  EXPECT_THAT(launch.err(), Not(HasSubstr("exited with")));
}

TEST(LauncherTest, KillsRanksThatIgnoreAPassedSignalAfterTheGrace) {
  LaunchedProcess launch(shell("trap '' INT; echo pid=$$; while :; do sleep 9; done", ranks(1)));
  const int rank = launch.printed_number("pid");
  launch.signal(SIGINT);
  EXPECT_EQ(launch.wait(), 128 + SIGINT);
  EXPECT_FALSE(is_running(rank));
}

TEST(LauncherTest, LeavesIgnoredSignalsIgnored) {
  LaunchedProcess launch([] {
    ::signal(SIGHUP, SIG_IGN);  // nohup
    return shell("echo ready; sleep 0.3; echo survived", ranks(1))();
  });
  ASSERT_TRUE(launch.prints("ready"));
  launch.signal(SIGHUP);
  EXPECT_EQ(launch.wait(), 0);
  EXPECT_THAT(launch.out(), HasSubstr("survived"));
}

TEST(LauncherTest, EndsTheRanksWhenNobodyReadsItsOutputAnyMore) {
  LaunchedProcess launch([] {
    int ends[2];
    if (::pipe(ends) != 0) return 98;
    ::dup2(ends[1], STDOUT_FILENO);
    ::close(ends[0]);  // as `zp run ... | head` after the last line
    ::signal(SIGPIPE, SIG_DFL);
    return shell("while :; do echo y; done", ranks(2))();
  });
  EXPECT_EQ(launch.wait(), 128 + SIGPIPE);
  EXPECT_LT(launch.seconds(), kMargin);
}

TEST(LauncherTest, LeavesNoRankBehindWhenItIsKilledItself) {
  LaunchedProcess launch(shell("echo pid$RANK=$$; exec sleep 100", ranks(2)));
  const int first = launch.printed_number("pid0");
  const int second = launch.printed_number("pid1");
  ASSERT_TRUE(is_running(first) && is_running(second));
  launch.signal(SIGKILL);
  EXPECT_EQ(launch.wait(), -SIGKILL);
  EXPECT_TRUE(holds_within(kMargin, [&] { return !is_running(first) && !is_running(second); }));
}

TEST(LauncherTest, EndsGrandchildrenOfFailedAndOfFinishedRanks) {
  LaunchedProcess launch(
      shell("sleep 100 & echo child$RANK=$!; " + kRankOne + "kill -9 $$; exit 0", ranks(2)));
  EXPECT_EQ(launch.wait(), 128 + SIGKILL);
  const int first = launch.printed_number("child0");
  const int second = launch.printed_number("child1");
  ASSERT_TRUE(first > 0 && second > 0);
  EXPECT_TRUE(holds_within(0.5, [&] { return !is_running(first) && !is_running(second); }));
}

TEST(LauncherTest, NamesAProgramThatCannotBeStarted) {
  LaunchedProcess missing([] { return launch_program({"no-such-program"}, ranks(3)); });
  EXPECT_EQ(missing.wait(), 127);
  EXPECT_EQ(missing.err(), "zeropage: cannot start 'no-such-program': No such file or directory\n");
  LaunchedProcess folder([] { return launch_program({"/tmp"}, ranks(3)); });
  EXPECT_EQ(folder.wait(), 126);
  EXPECT_EQ(folder.err(), "zeropage: cannot start '/tmp': Permission denied\n");
}

TEST(LauncherTest, RunsAFunctionInEveryRank) {
  LaunchedProcess launch([] {
    std::printf("buffered before the fork\n");
    return launch_function(
        [] {
          std::printf("rank %s of %s", variable("RANK").c_str(), variable("WORLD_SIZE").c_str());
          return variable("RANK") == "1" ? 256 : 0;
        },
        ranks(2));
  });
  EXPECT_EQ(launch.wait(), 1);  // 256 would be success to a shell
  EXPECT_THAT(launch.out(), HasSubstr("[rank 0] rank 0 of 2\n"));
  EXPECT_THAT(launch.out(), HasSubstr("[rank 1] rank 1 of 2\n"));
  EXPECT_THAT(launch.out(), testing::StartsWith("buffered before the fork\n"));
  EXPECT_EQ(launch.out().find("buffered"), launch.out().rfind("buffered"));
}

TEST(LauncherTest, PrintsTheExceptionThatLeavesAFunctionWithoutTheNativeStack) {
  const auto fail = []() -> int {
    throw std::runtime_error("page \"x\": lost\nException raised from f at a.cpp:1\nframe #0");
  };
  LaunchedProcess launch(function(fail, ranks(1)));
  EXPECT_EQ(launch.wait(), 1);
  EXPECT_THAT(launch.err(), HasSubstr("rank 0 ended by an exception: page \"x\": lost\n"));
  EXPECT_THAT(launch.err(), Not(HasSubstr("frame #0")));
}

TEST(LauncherTest, KeepsTheLinesOfAFunctionThatCrashes) {
  const auto crash = [] {
    std::printf("about to crash\n");
    return ::raise(SIGKILL);
  };
  LaunchedProcess launch(function(crash, ranks(1)));
  EXPECT_EQ(launch.wait(), 128 + SIGKILL);
  EXPECT_THAT(launch.err(), HasSubstr("last lines of rank 0:\n  | about to crash\n"));
}

TEST(LauncherTest, RefusesToForkAProcessWithOtherThreads) {
  LaunchedProcess launch([] {
    std::thread other([] { std::this_thread::sleep_for(std::chrono::seconds(2)); });
    other.detach();
    return launch_function([] { return 0; }, ranks(1));
  });
  EXPECT_EQ(launch.wait(), 99);
  EXPECT_THAT(launch.err(), ContainsRegex("1 thread, got [2-9].*first thing in main"));
}

TEST(LauncherTest, RefusesToForkOnceAnAcceleratorsDriverWasAsked) {
  LaunchedProcess launch([] {
    device::note_driver_use("a stand-in for the driver");
    device::note_driver_use("somebody later");
    return launch_function([] { return 0; }, ranks(2));
  });
  EXPECT_EQ(launch.wait(), 99);
  EXPECT_THAT(launch.err(),
              HasSubstr("has not started an accelerator's driver, and this one has (a stand-in for "
                        "the driver asked it)"));
  EXPECT_THAT(launch.err(), HasSubstr("ask for devices in the ranks only"));
}

// A build for the host may be asked which devices there are, as before there was anything to refuse.
TEST(LauncherTest, ForksWhereABuildThatHasNoDriverWasAsked) {
  const auto forks_after_a_question = [](bool strict) {
    LaunchedProcess launch([strict] {
      if (strict) ::setenv("ZEROPAGE_STRICT_FORK", "1", /*overwrite=*/1);
      device::note_driver_question("a question");
      return launch_function([] { return 0; }, ranks(2));
    });
    return launch.wait();
  };
  EXPECT_EQ(forks_after_a_question(false), 0);
  EXPECT_EQ(forks_after_a_question(true), 99);
}

TEST(LauncherTest, ForksAfterARankOfAnEarlierLaunchAskedTheDriver) {
  LaunchedProcess launch([] {
    const auto ask = [] {
      device::note_driver_use("a rank");
      return 0;
    };
    return launch_function(ask, ranks(2)) + launch_function(ask, ranks(2));
  });
  EXPECT_EQ(launch.wait(), 0) << launch.err();
}

TEST(LauncherTest, SeesTheDriversFileWhoeverOpenedIt) {
  const std::string file = ::testing::TempDir() + "zeropage-driver-" + std::to_string(::getpid());
  EXPECT_EQ(device::driver_use(file), "");
  const int opened = ::open((file + "-uvm").c_str(), O_CREAT | O_RDWR, 0600);
  ASSERT_GE(opened, 0);
  EXPECT_EQ(device::driver_use(file),
            "the process has " + file + "-uvm open, which CUDA opens when it starts");
  ::close(opened);
  EXPECT_EQ(device::driver_use(file), "");
  ::unlink((file + "-uvm").c_str());
}

TEST(LauncherTest, RefusesOptionsThatMakeNoSense) {
  EXPECT_THROW(launch_program({"true"}, ranks(0)), std::invalid_argument);
  EXPECT_THROW(launch_program({"true"}, ranks(4097)), std::invalid_argument);
  EXPECT_THROW(launch_program({}, ranks(1)), std::invalid_argument);
  EXPECT_THROW(launch_program({"true"}, ranks(1, milliseconds(-1))), std::invalid_argument);
  EXPECT_THROW(launch_function([] { return 0; }, ranks(-1)), std::invalid_argument);
}

}  // namespace
}  // namespace zeropage::comm::launcher_test

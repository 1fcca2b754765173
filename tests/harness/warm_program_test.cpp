#include "tests/harness/warm_program.h"

#include <sstream>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace zeropage::warm_program_test {
namespace {

using namespace testing;

#ifdef WARM_START

TEST(WarmProgramTest, AWarmStartGivesWhatAShellGives) {
  for (const std::string flags :
       {" --help", " --no-such-flag", " --ranks 2  --communicator shared"}) {
    const std::string command = COLLECTIVES_TOUR + flags;
    ASSERT_TRUE(runs_warm(command));
    const Outcome of_shell = shell(command);
    for (int time = 0; time < 2; ++time) {
      const Outcome warm = run_program(command);
      EXPECT_EQ(warm.exit_code, of_shell.exit_code) << flags;
      EXPECT_EQ(warm.output, of_shell.output) << flags;
    }
  }
}

TEST(WarmProgramTest, OneProcessForksForEachCommand) {
  const auto pids = [] {
    std::istringstream stat(run_program("/bin/cat /proc/self/stat").output);
    int own = 0, parent = 0;
    std::string name, state;
    stat >> own >> name >> state >> parent;
    return std::pair(own, parent);
  };
  const auto [first, parent] = pids();
  const auto [second, parent_of_second] = pids();
  EXPECT_NE(first, second);
  EXPECT_EQ(parent, parent_of_second);
  EXPECT_NE(parent, ::getpid());
}

TEST(WarmProgramTest, TheProgramSeesNothingOfIt) {
  const std::string environment = run_program("/usr/bin/env").output;
  EXPECT_THAT(environment, ::testing::HasSubstr("PATH="));
  EXPECT_THAT(environment, ::testing::Not(::testing::HasSubstr("LD_PRELOAD")));
  EXPECT_THAT(environment, ::testing::Not(::testing::HasSubstr("ZEROPAGE_TESTS")));
}

#endif

TEST(WarmProgramTest, WhatNeedsAShellGoesToOne) {
  for (const std::string command :
       {"train_gpt", "RANK=0 /bin/echo", "/bin/echo $HOME", "/bin/echo 'a b'", "cd /; ls"}) {
    EXPECT_FALSE(runs_warm(command)) << command;
  }
  EXPECT_FALSE(runs_warm("/bin/echo " + std::string(100'000, 'x')));
  EXPECT_EQ(run_program("/bin/echo \"a  b\"").output, "a  b\n");
}

}  // namespace
}  // namespace zeropage::warm_program_test

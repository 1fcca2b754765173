#include "tests/harness/warm_program.h"

#include <gtest/gtest.h>

namespace zeropage::warm_program_test {
namespace {

using namespace testing;

TEST(WarmProgramTest, AWarmStartGivesWhatAShellGives) {
  for (const std::string flags :
       {" --help", " --no-such-flag", " --ranks 2  --communicator shared"}) {
    const std::string command = COLLECTIVES_TOUR + flags;
    const Outcome of_shell = shell(command);
    for (int time = 0; time < 2; ++time) {
      const Outcome warm = run_program(command);
      EXPECT_EQ(warm.exit_code, of_shell.exit_code) << flags;
      EXPECT_EQ(warm.output, of_shell.output) << flags;
    }
  }
}

TEST(WarmProgramTest, WhatNeedsAShellGoesToOne) {
  for (const std::string command :
       {"train_gpt", "RANK=0 /bin/echo", "/bin/echo $HOME", "/bin/echo 'a b'", "cd /; ls"})
    EXPECT_FALSE(runs_warm(command)) << command;
  EXPECT_EQ(run_program("/bin/echo \"a  b\"").output, "a  b\n");
}

}  // namespace
}  // namespace zeropage::warm_program_test

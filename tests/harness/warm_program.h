// A program of ours that a test runs many times. Loading LibTorch takes 0.3 s of CPU time, more than most of what tests train.
#pragma once

#include <string>

#include "tests/harness/shell.h"

namespace zeropage::testing {

// A command as users type it, with what it printed, as shell() gives it. Where `command` is a program's absolute path and words that mean
// nothing to a shell, then a process that has loaded the program forks for it: the first call of a program in a test process starts it.
// The program sees the environment and the working folder of that first call. Other commands, and all in builds with a sanitizer, go
// to a shell.
Outcome run_program(const std::string& command);

// Whether a fork runs `command`.
bool runs_warm(const std::string& command);

}  // namespace zeropage::testing

// A command as users type it, with what it printed.
#pragma once

#include <cstdio>
#include <string>
#include <sys/wait.h>

namespace zeropage::testing {

struct Outcome {
  int exit_code = -1;
  std::string output;  // stdout and stderr
};

inline Outcome shell(const std::string& command) {
  Outcome outcome;
  FILE* pipe = ::popen(("{ " + command + " ; } 2>&1").c_str(), "r");
  char buffer[4096];
  while (const size_t count = std::fread(buffer, 1, sizeof(buffer), pipe))
    outcome.output.append(buffer, count);
  const int status = ::pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

}  // namespace zeropage::testing

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

// The exit code in what waitpid() writes, as a shell gives it.
inline int exit_code_of(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

inline Outcome shell(const std::string& command) {
  Outcome outcome;
  FILE* pipe = ::popen(("{ " + command + " ; } 2>&1").c_str(), "r");
  char buffer[4096];
  while (const size_t count = std::fread(buffer, 1, sizeof(buffer), pipe))
    outcome.output.append(buffer, count);
  outcome.exit_code = exit_code_of(::pclose(pipe));
  return outcome;
}

}  // namespace zeropage::testing

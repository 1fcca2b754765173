// The variables that make a process a rank, the ones World::from_environment() and torchrun's
// scripts read.
//
// Lifetime, threads: plain values; read and changed by the thread that starts the ranks, `environ`
// included.
// Throws: find_free_port, std::system_error.
#pragma once

#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

namespace zeropage::comm::detail {

struct RankEnvironment {
  int rank = 0;
  int world_size = 1;
  int master_port = 0;
  pid_t launcher = 0;

  std::vector<std::pair<std::string, std::string>> variables() const;

  // "NAME=value" of our own environment with the rank's variables in place of what it had.
  std::vector<std::string> merged_with_own() const;

  // Sets the variables in this process (a rank that is a fork of the launcher).
  void apply() const;
};

// A TCP port that was free on 127.0.0.1 a moment ago. Another process may take it before rank 0
// listens on it: the kernel hands out ports at random from a range of thousands, so this is rare,
// and rank 0 then fails by name.
int find_free_port();

}  // namespace zeropage::comm::detail

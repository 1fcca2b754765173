// The variables that make a process a rank, the ones World::from_environment() and torchrun's
// scripts read.
//
// Lifetime, threads: plain values; read and changed by the thread that starts the ranks, `environ`
// included.
// Throws: bind_free_port, std::system_error.
#pragma once

#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

#include "comm/launcher/file_descriptor.h"

namespace zeropage::comm::detail {

struct RankEnvironment {
  int rank = 0;
  int world_size = 1;
  int master_port = 0;
  int store_socket = -1;  // bound to the port; rank 0's to listen at; -1: it makes one
  pid_t launcher = 0;
  // Where ranks that are started again find the others, and their copies; "": none is started again.
  std::string generations = {};
  std::string copies = {};

  std::vector<std::pair<std::string, std::string>> variables() const;

  // "NAME=value" of our own environment with the rank's variables in place of what it had.
  std::vector<std::string> merged_with_own() const;

  // Sets the variables in this process (a rank that is a fork of the launcher).
  void apply() const;
};

// A socket on 127.0.0.1, bound to a free TCP port, which nobody else gets while it is open. It closes on
// exec. Whoever does not listen at it but binds the port as well (SO_REUSEADDR) may.
struct PortSocket {
  FileDescriptor socket;
  int port = 0;
};
PortSocket bind_free_port();

}  // namespace zeropage::comm::detail

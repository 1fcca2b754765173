// The command line of `collectives`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/collectives/case.h"

namespace collectives {

struct Flags {
  std::vector<int> ranks = {2, 4};
  std::vector<Operation> operations;
  std::vector<int64_t> sizes_bytes;  // of the whole tensor
  std::vector<std::string> transports;
  int rounds = 5;
  // Empty: no JSON. "-": stdout, and the table goes to stderr.
  std::string json;

  bool json_to_stdout() const { return json == "-"; }
};

// The operations with their sizes, in the order in which they are measured.
std::vector<Case> cases(const Flags& flags);

// Returns the exit code if the program should end: after --help, or a mistake, which it has printed.
std::optional<int> parse_flags(int argc, char** argv, Flags& flags);

}  // namespace collectives

// The command line of `collectives`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/collectives/case.h"

namespace CLI {
class App;
}

namespace collectives {

struct Flags {
  int ranks = 2;
  std::vector<std::string> operations;
  std::vector<int64_t> sizes_bytes;  // of the whole tensor
  std::vector<std::string> transports = {"shared", "gloo", "c10d"};
  int rounds = 5;
  // Empty: no JSON. "-": stdout, and the table goes to stderr.
  std::string json;
};

// flags must live as long as the app.
void add_flags(CLI::App& app, Flags& flags);

// The operations with their sizes, in the order in which they are measured.
std::vector<Case> cases(const Flags& flags);

}  // namespace collectives

// What the figures were measured on.
#pragma once

#include <string>

namespace collectives {

struct Machine {
  std::string host;
  std::string cpu;
  int cores = 0;
  double load = 0;  // runnable processes, mean of the last minute
  std::string libtorch;
};

Machine describe_machine();

}  // namespace collectives

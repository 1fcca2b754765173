// The command line.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <zeropage/schedule.h>

namespace model_parallel {

struct Flags {
  int ranks = 2;
  int threads = 1;  // of a rank
  zeropage::parallel::ScheduleKind schedule = zeropage::parallel::ScheduleKind::kGPipe;
  int64_t batch = 96;
  std::vector<int64_t> split_sizes = {4, 8, 16, 24, 32, 48};
  int64_t image_side = 64;
  int64_t width = 64;
  int64_t classes = 1000;
  int64_t steps = 2;  // that are measured, behind one that is not
  int rounds = 3;
  uint64_t seed = 1;
  std::string json, svg;
  std::vector<std::string> drawn;  // files of figures; measures nothing
};

// Ends the program with 2 where the command line makes no sense.
Flags read_flags(int argc, char** argv);

}  // namespace model_parallel

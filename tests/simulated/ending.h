// What a run ends with.
#pragma once

#include <cstdint>

#include "tests/simulated/run_plan.h"

namespace zeropage::simulated {

struct Ending {
  uint64_t hash = 0;  // of the whole model's bytes
  int64_t step = 0;
  int64_t noted = 0;  // steps as the loop's own extra counted them

  friend bool operator==(const Ending&, const Ending&) = default;
};

// What a run ends with that nothing happens to, from a run at the least stage that has the same bits. Each kind runs once a process. Threads: any.
Ending unbroken_ending(const Training& training, int64_t steps);

}  // namespace zeropage::simulated

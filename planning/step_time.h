// The seconds of a step, from what it does and how fast the machine is at that.
//
// On a host the same cores compute and send, so times add up:
//
//   products / (flops a second) + other operators / (bytes a second) + the update + messages
//
// where a rank has as many threads as are asked for, but no more than its part of the host's cores. What goes to
// a disk runs beside all of that, so a step takes the longer of both. Backward is taken to do twice forward's
// products, and twice the bytes of its other operators.
#pragma once

#include "zeropage/plan.h"

namespace zeropage::planning {

// The work of a rank in one step.
struct StepWork {
  double forward_flops = 0;  // of products
  double recomputed_flops = 0;
  double forward_bytes = 0;  // read and written by other operators of forward
  double recomputed_bytes = 0;
  double updated_elements = 0;
  double sent_bytes = 0;
  double messages = 0;
  double disk_read_bytes = 0;
  double disk_written_bytes = 0;
};

// Ranks of a host, and threads of each; 0 threads: the cores, in equal parts.
struct StepThreads {
  int ranks_of_host = 1;
  int threads_of_rank = 0;
};

double step_seconds(const StepWork& work, const MachineSpeeds& speeds, const StepThreads& threads);

}  // namespace zeropage::planning

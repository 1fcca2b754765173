// The order in which the gradients of micro-steps are summed.
#pragma once

#include "zero/gradients/micro_step_sums.h"
#include "zeropage/options.h"

namespace zeropage {

inline accumulate::SumOrder sum_order_of(const Options& options) {
  return options.world_invariant ? accumulate::SumOrder::kTree : accumulate::SumOrder::kRunning;
}

}  // namespace zeropage

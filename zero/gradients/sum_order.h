// The order in which the gradients of micro-steps are summed.
#pragma once

#include "zero/gradients/micro_step_sums.h"
#include "zeropage/options.h"

namespace zeropage::zero {

inline SumOrder sum_order_of(const Options& options) {
  return options.world_invariant ? SumOrder::kTree : SumOrder::kRunning;
}

}  // namespace zeropage::zero

// The mean of the gradients of experts that are cut over ranks (zeropage/expert_parallel.h).
//
// A rank's gradient of its experts is a sum already, over the tokens of all ranks along the axis "expert". What reduces it is the mean over
// the ranks with the same experts, which divides by their number alone. All reductions of gradients divide by the rest here.
#pragma once

#include <ATen/core/TensorBody.h>

#include "zero/pages/parameter_pages.h"
#include "zeropage/communicator.h"

namespace zeropage::zero {

// values: of the page's gradient, which is about to be reduced by that operation; changed in place.
inline void average_over_experts(const ParameterPages& pages, size_t page, comm::ReduceOp op,
                                 const at::Tensor& values) {
  const int ranks = pages.ranks_of_experts(page);
  if (ranks > 1 && op == comm::ReduceOp::kMean) at::Tensor(values).div_(ranks);
}

}  // namespace zeropage::zero

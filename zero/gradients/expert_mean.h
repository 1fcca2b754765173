// Sums of the gradients of experts that are cut over ranks (zeropage/expert_parallel.h).
//
// A rank's gradient of its experts is the mean over the ranks along the axis "expert" already, so the mean over the ranks with the same
// experts is that over all ranks. A sum over all ranks, as an accumulator wants that divides by weights, is so many times theirs.
#pragma once

#include <ATen/core/TensorBody.h>

#include "zero/pages/parameter_pages.h"
#include "zeropage/communicator.h"

namespace zeropage::zero {

// values: of the page's gradient, which is about to be reduced by that operation over the ranks that have the page; changed in place.
inline void count_all_ranks(const ParameterPages& pages, size_t page, comm::ReduceOp op,
                            const at::Tensor& values) {
  const int ranks = pages.ranks_of_experts(page);
  if (ranks > 1 && op == comm::ReduceOp::kSum) at::Tensor(values).mul_(ranks);
}

}  // namespace zeropage::zero

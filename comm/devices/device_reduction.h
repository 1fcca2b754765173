// The order of summation of zeropage/communicator.h on a device, by LibTorch's operators on the calling
// thread's current stream: the same bits as on the host.
//
// Memory beside the tensors: up to log2(ranks) + 1 times numel accumulators, freed in that stream's
// order.
#pragma once

#include <ATen/core/TensorBody.h>

#include "zeropage/communicator.h"

namespace zeropage::comm::detail {

// Divides by a number of ranks as the host does: one rounding for each element. (A scalar on the
// host would make LibTorch's CUDA kernel multiply by its reciprocal, which rounds twice.)
class Divisor {
 public:
  Divisor(int ranks, c10::Device device);

  // tensor: [numel], becomes its quotient; of integers, towards zero.
  void divide(const at::Tensor& tensor) const;

 private:
  const at::Tensor floating_;  // [1]
  const at::Tensor integer_;   // [1]
};

// out: [numel], of the dtype of contributions: [ranks * numel], by rank. They may overlap.
void reduce_in_rank_order(const at::Tensor& contributions, int ranks, const at::Tensor& out,
                          ReduceOp op, const Divisor& divisor);

}  // namespace zeropage::comm::detail

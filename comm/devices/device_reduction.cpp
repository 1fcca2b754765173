#include "comm/devices/device_reduction.h"

#include <bit>

#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include "zeropage/communicator.h"

namespace zeropage::comm::detail {
namespace {

// The tree over ranks [low, high) of contributions: [ranks, numel]. A sum of several is a tensor of
// its own, so the next level may add into it.
at::Tensor reduce_tree(const at::Tensor& contributions, int low, int high, ReduceOp op) {
  if (high - low == 1) {
    return contributions[low].to(accumulator_of(contributions.scalar_type()));
  }
  const int middle = low + static_cast<int>(std::bit_floor(static_cast<unsigned>(high - low - 1)));
  const at::Tensor left = reduce_tree(contributions, low, middle, op);
  const at::Tensor right = reduce_tree(contributions, middle, high, op);
  if (op == ReduceOp::kMax) return at::maximum(left, right);
  if (op == ReduceOp::kMin) return at::minimum(left, right);
  return middle - low == 1 ? left.add(right) : left.add_(right);
}

}  // namespace

Divisor::Divisor(int ranks, c10::Device device)
    : floating_(at::full({1}, ranks, at::TensorOptions(device).dtype(at::kFloat))),
      integer_(at::full({1}, ranks, at::TensorOptions(device).dtype(at::kLong))) {}

void Divisor::divide(const at::Tensor& tensor) const {
  if (tensor.is_floating_point()) {
    tensor.div_(floating_);
  } else {
    tensor.div_(integer_, "trunc");
  }
}

void reduce_in_rank_order(const at::Tensor& contributions, int ranks, const at::Tensor& out,
                          ReduceOp op, const Divisor& divisor) {
  at::Tensor reduced = reduce_tree(contributions.view({ranks, out.numel()}), 0, ranks, op);
  if (op == ReduceOp::kMean && ranks > 1) divisor.divide(reduced);
  out.copy_(reduced);
}

}  // namespace zeropage::comm::detail

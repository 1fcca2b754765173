// Sums and means over ranks for metrics.
#include <ATen/ATen.h>

#include "zeropage/check.h"
#include "zeropage/ledger.h"
#include "zeropage/world.h"

namespace zeropage::comm {
namespace {

bool can_be_reduced(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kLong:
    case at::kInt:
    case at::kByte:
      return true;
    default:
      return false;
  }
}

void check_tensors(const World& world, const at::Tensor& tensor, ReduceOp op, const char* who) {
  const bool is_there = tensor.defined();
  world.check_agreement(who,
                        {c10::str("sizes: ", is_there ? c10::str(tensor.sizes()) : "undefined"),
                         c10::str("dtype: ", is_there ? c10::toString(tensor.scalar_type()) : "-"),
                         c10::str("device: ", is_there ? tensor.device().type() : at::kCPU)});
  ZP_CHECK(is_there, who, ": expected a tensor, got an undefined one");
  ZP_CHECK(can_be_reduced(tensor.scalar_type()), who,
           ": expected float, double, bfloat16, half, int64, int32 or uint8, got ",
           tensor.scalar_type(), "; convert it, as by .to(torch::kLong)");
  ZP_CHECK(op != ReduceOp::kMean || tensor.is_floating_point(), who,
           ": a mean of whole numbers would be cut off, got ", tensor.scalar_type(),
           "; convert it, as by .to(torch::kDouble)");
}

at::Tensor reduced(const World& world, const at::Tensor& tensor, ReduceOp op, const char* who) {
  check_tensors(world, tensor, op, who);
  const at::NoGradGuard no_grad;
  Communicator& communicator = world.communicator();
  const c10::Device device =
      communicator.moves(tensor.device()) ? tensor.device() : communicator.device();
  const at::Tensor copy =
      tensor.detach().to(tensor.options().device(device), /*non_blocking=*/false,
                         /*copy=*/true, at::MemoryFormat::Contiguous);
  communicator.all_reduce(copy.view({-1}), op, who).wait();
  return copy.to(tensor.device());
}

double reduced(const World& world, double value, ReduceOp op, const char* who) {
  Communicator& communicator = world.communicator();
  const at::Tensor cell = communicator.moves(at::kCPU) ? at::empty({1}, at::kDouble)
                                                       : communicator.buffer(1, at::kDouble);
  cell.fill_(value);
  communicator.all_reduce(cell, op, who).wait();
  return cell.item<double>();
}

constexpr const char* kSum = "World::sum()";
constexpr const char* kMean = "World::mean()";
constexpr const char* kMin = "World::min()";
constexpr const char* kMax = "World::max()";

}  // namespace

double World::sum(double value) const {
  return reduced(*this, value, ReduceOp::kSum, kSum);
}
double World::mean(double value) const {
  return reduced(*this, value, ReduceOp::kMean, kMean);
}
double World::min(double value) const {
  return reduced(*this, value, ReduceOp::kMin, kMin);
}
double World::max(double value) const {
  return reduced(*this, value, ReduceOp::kMax, kMax);
}

at::Tensor World::sum(const at::Tensor& tensor) const {
  return reduced(*this, tensor, ReduceOp::kSum, kSum);
}
at::Tensor World::mean(const at::Tensor& tensor) const {
  return reduced(*this, tensor, ReduceOp::kMean, kMean);
}
at::Tensor World::min(const at::Tensor& tensor) const {
  return reduced(*this, tensor, ReduceOp::kMin, kMin);
}
at::Tensor World::max(const at::Tensor& tensor) const {
  return reduced(*this, tensor, ReduceOp::kMax, kMax);
}

}  // namespace zeropage::comm

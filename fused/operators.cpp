#include "fused/operators.h"

#include "fused/cuda/rows.h"
#include "optim/cuda/current_stream.h"
#include "zeropage/check.h"

namespace zeropage::fused {

std::optional<void*> kernel_stream(const at::Tensor& tensor) {
  if (!tensor.is_cuda() || !is_of_loops(tensor) || !cuda::are_built()) return std::nullopt;
  return optim::cuda::current_stream(tensor.device());
}

void refuse_second_derivative(const char* who) {
  ZP_CHECK(!at::GradMode::is_enabled(), "zeropage::fused::", who,
           ": expected a plain backward, got one with create_graph=true; it has no second "
           "derivative, so use LibTorch's "
           "operators where you need one");
}

void check_alike(const char* who, const at::Tensor& first, const at::Tensor& second,
                 const char* what) {
  ZP_CHECK(at::isFloatingType(first.scalar_type()), "zeropage::fused::", who,
           ": expected floating-point numbers, got ", first.scalar_type(), "; convert the input");
  ZP_CHECK(second.scalar_type() == first.scalar_type() && second.device() == first.device(),
           "zeropage::fused::", who, ": expected ", what, " as the input, ", first.scalar_type(),
           " on ", first.device(), ", got ", second.scalar_type(), " on ", second.device(),
           "; convert one of them");
}

}  // namespace zeropage::fused

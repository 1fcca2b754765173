#include "optim/whole_step.h"

#include <ATen/ops/zeros_like.h>

namespace zeropage::optim {

at::Tensor made_alike(at::Tensor& tensor, const at::Tensor& parameter) {
  if (!tensor.defined()) tensor = at::zeros_like(parameter);
  return tensor;
}

void check_steppable(const char* who, const at::Tensor& parameter, const at::Tensor& gradient) {
  ZP_CHECK(
      !gradient.is_sparse(), who, ": a parameter of sizes ", parameter.sizes(),
      ": expected a dense gradient, got a sparse one; call to_dense() on it, or make the layer "
      "with sparse(false)");
  ZP_CHECK(parameter.scalar_type() == at::kFloat && parameter.is_contiguous() &&
               gradient.scalar_type() == at::kFloat,
           who, ": a parameter of sizes ", parameter.sizes(),
           ": expected contiguous fp32 with a gradient of fp32, got ", parameter.scalar_type(),
           parameter.is_contiguous() ? "" : " that is not contiguous", " with ",
           gradient.scalar_type(),
           "; zeropage::Optimizer steps low precision and other strides, also on one rank");
}

}  // namespace zeropage::optim

#include "optim/flat_tensor.h"

#include "zeropage/check.h"

namespace zeropage::optim {

void check_flat(const Role& role, const at::Tensor& tensor) {
  ZP_CHECK(tensor.defined(), role.who, ": ", role.what,
           ": expected a flat tensor, got an undefined one");
  ZP_CHECK(tensor.layout() == at::kStrided && tensor.dim() == 1 && tensor.is_contiguous(), role.who,
           ": ", role.what, ": expected a flat, contiguous tensor, got sizes ", tensor.sizes(),
           "; pass tensor.view(-1) of a contiguous tensor");
  ZP_CHECK(tensor.is_cpu() || tensor.is_cuda() || tensor.is_meta(), role.who, ": ", role.what,
           ": expected it on cpu or cuda, got ", tensor.device(), "; move it there");
}

void check_alike(const Role& role, const at::Tensor& tensor, const at::Tensor& like) {
  check_flat(role, tensor);
  ZP_CHECK(tensor.numel() == like.numel(), role.who, ": ", role.what, ": expected ", like.numel(),
           " elements, as many as values, got ", tensor.numel(),
           "; pass the same stretch of every buffer");
  ZP_CHECK(tensor.device() == like.device(), role.who, ": ", role.what, ": expected it on ",
           like.device(), ", where the values are, got ", tensor.device(), "; move it there");
}

void check_fp32(const Role& role, const at::Tensor& tensor) {
  ZP_CHECK(tensor.scalar_type() == at::kFloat, role.who, ": ", role.what, ": expected fp32, got ",
           tensor.scalar_type(), "; lower precisions keep fp32 master weights and states");
}

Precision precision_of(const Role& role, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Precision::kFloat;
    case at::kBFloat16:
      return Precision::kBFloat16;
    case at::kHalf:
      return Precision::kHalf;
    default:
      ZP_THROW(role.who, ": ", role.what, ": expected fp32, bf16 or fp16, got ",
               tensor.scalar_type(), "; convert it with .to()");
  }
}

FlatElements flat_elements(const Role& role, const at::Tensor& flat) {
  check_flat(role, flat);
  const void* const first = flat.const_data_ptr();
  switch (flat.scalar_type()) {
    case at::kDouble:
      return static_cast<const double*>(first);
    case at::kFloat:
      return static_cast<const float*>(first);
    case at::kBFloat16:
      return static_cast<const BFloat16Bits*>(first);
    case at::kHalf:
      return static_cast<const HalfBits*>(first);
    default:
      ZP_THROW(role.who, ": ", role.what, ": expected fp64, fp32, bf16 or fp16, got ",
               flat.scalar_type(), "; convert it with .to()");
  }
}

}  // namespace zeropage::optim

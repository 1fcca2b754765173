// Flat tensors, checked, as the loops and kernels see them.
#pragma once

#include <ATen/core/Tensor.h>

#include "optim/exact_squares.h"
#include "optim/flat_stretch.h"

namespace zeropage::optim {

// The function that checks a tensor, and the tensor's part in it: {"fused_step", "gradient"}.
struct Role {
  const char* who;
  const char* what;
};

// Throws unless the tensor is defined, flat, contiguous and on the CPU, CUDA or the meta device.
void check_flat(const Role& role, const at::Tensor& tensor);

// Throws unless the tensor is flat and has `like`'s numel and device.
void check_alike(const Role& role, const at::Tensor& tensor, const at::Tensor& like);

void check_fp32(const Role& role, const at::Tensor& tensor);

// fp32, bf16 or fp16; throws on others.
Precision precision_of(const Role& role, const at::Tensor& tensor);

// The first element of a flat tensor that has norms: fp64, fp32, bf16 or fp16; throws on others. Null
// on the meta device.
FlatElements flat_elements(const Role& role, const at::Tensor& flat);

}  // namespace zeropage::optim

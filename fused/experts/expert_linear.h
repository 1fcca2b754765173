// Linear layers of many experts, each over rows of its own.
#pragma once

#include <ATen/core/TensorBody.h>

namespace zeropage::fused {

// Rows that are sorted by expert.
struct ExpertRows {
  at::Tensor ends;  // [experts], int32: behind each expert's last row
  bool all;         // whether the last end is the number of rows, so that each row has an expert
};

// rows[i] weight[e]^T for each row i of expert e; zeros for rows without one. rows: [n, in]; weight: [experts, out, in], with any strides.
// Returns [n, out]. One operator with a gradient; that of the weight is zeros for an expert without rows. All of one floating-point
// dtype and device. On the host, a product of matrices an expert.
at::Tensor expert_linear(const at::Tensor& rows, const at::Tensor& weight, const ExpertRows& of);

// The same by LibTorch's grouped product, which has bf16, and on the host fp32 and fp16, and widths that are multiples of 16 bytes.
at::Tensor grouped_linear(const at::Tensor& rows, const at::Tensor& weight, const ExpertRows& of);
// Sum over an expert's rows of gradient^T rows. gradient: [n, out]; rows: [n, in]. Returns [experts, out, in].
at::Tensor grouped_weight_gradient(const at::Tensor& gradient, const at::Tensor& rows,
                                   const ExpertRows& of);

}  // namespace zeropage::fused

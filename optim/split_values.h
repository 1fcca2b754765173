// fp32 tensors as bf16 ones and the 16 bits that remain (optim/split_value.h), by LibTorch's
// operators: for what happens once. Any device; throws c10::Error as they do.
#pragma once

#include <ATen/core/Tensor.h>

namespace zeropage::optim {

struct SplitValues {
  at::Tensor high;  // bf16
  at::Tensor low;   // int16
};

// values: of any floating point, taken as fp32; both are of its sizes.
SplitValues split_values(const at::Tensor& values);

// fp32, with the bits that were split.
at::Tensor joined_values(const at::Tensor& high, const at::Tensor& low);

}  // namespace zeropage::optim

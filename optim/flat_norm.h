// Sums of squares, and the look for infinities, of flat gradients.
//
//   const double norm = std::sqrt(offload::sum_of_squares(gradient).value());
//                                                              // not finite if an element is not
//
// Each square is added exactly (optim/exact_squares.h), so a norm depends on the elements alone: not
// on their order and places, the device, the number of threads, or how many ranks or calls share them.
//
// Squares of fp32, bf16 and fp16 are exact in fp64, and cannot overflow. Those of fp64 are rounded
// once each, and are infinite above the largest fp64's root, 1.3e154. A NaN is a NaN: its bits are
// the machine's.
// `flat`: fp64, fp32, bf16 or fp16, contiguous. Reads the input once.
// Throws c10::Error on other tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "optim/exact_sum.h"

namespace zeropage::optim {

// On the host; optim/norm_table.h has them on devices too.
ExactSum sum_of_squares(const at::Tensor& flat);

// fp32 [1]: 1 if an element is infinite or NaN, else 0. For GradientFactors. On CUDA the work is
// queued on the current stream.
at::Tensor found_inf(const at::Tensor& flat);

}  // namespace zeropage::optim

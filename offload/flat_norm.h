// Norms of flat gradients whose bits depend on the elements' places alone: not on the device, the
// number of threads, or how many ranks or calls share the work.
//
//   block_sums_of_squares: sums of 256 squares in fp64. In a block, elements 128 apart are added
//     first, then 64, ..., 1; what a ragged last block lacks counts as zeros.
//   sum_in_order: neighbours first, then pairs of them, and so on; an odd one at the end moves up
//     as it is. It is the tree of comm/'s sums over ranks. So the sum of any aligned stretch of
//     2^k blocks is one of the tree's partial sums.
//
// Squares of fp32, bf16 and fp16 are exact in fp64, and cannot overflow. A NaN is a NaN: its bits
// are the machine's.
// `flat`: fp32, bf16 or fp16, contiguous, on the CPU or CUDA; there the work is queued on the
// current stream. Reads the input once; the sums take 1 / 32 byte an element.
// Throws c10::Error in words on other tensors.
#pragma once

#include <ATen/core/Tensor.h>

namespace zeropage::offload {

// fp64 [ceil(numel / 256)].
at::Tensor block_sums_of_squares(const at::Tensor& flat);

// fp64 [1]; 0 for no terms. terms: fp64 [n], contiguous.
at::Tensor sum_in_order(const at::Tensor& terms);

// fp32 [1]: 1 if an element is infinite or NaN, else 0. For GradientFactors.
at::Tensor found_inf(const at::Tensor& flat);

}  // namespace zeropage::offload

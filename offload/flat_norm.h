// Norms of flat gradients whose bits depend on the elements' places alone: not on the device, the
// number of threads, or how many ranks or calls share the work.
//
//   offload::ExactSum squares;
//   const at::Tensor sums = offload::block_sums_of_squares(gradient).cpu();
//   squares.add({sums.const_data_ptr<double>(), static_cast<size_t>(sums.numel())});
//   const double norm = std::sqrt(squares.value());    // not finite if an element is not
//
// block_sums_of_squares: sums of 256 squares in fp64. In a block, elements 128 apart are added
// first, then 64, ..., 1; what a ragged last block lacks counts as zeros.
//
// Squares of fp32, bf16 and fp16 are exact in fp64, and cannot overflow. Those of fp64 are rounded
// once each, and are infinite above the largest fp64's root, 1.3e154. A NaN is a NaN: its bits are
// the machine's.
// `flat`: fp64, fp32, bf16 or fp16, contiguous, on the CPU or CUDA; there the work is queued on the
// current stream. Reads the input once; the sums take 1 / 32 byte an element. Other accelerators
// have block_sums_of_squares by LibTorch's operators.
// Throws c10::Error in words on other tensors.
#pragma once

#include <ATen/core/Tensor.h>

namespace zeropage::offload {

// fp64 [ceil(numel / 256)].
at::Tensor block_sums_of_squares(const at::Tensor& flat);

// fp32 [1]: 1 if an element is infinite or NaN, else 0. For GradientFactors.
at::Tensor found_inf(const at::Tensor& flat);

}  // namespace zeropage::offload

// fp32 to bf16 by stochastic rounding: a number between two bf16 numbers becomes one of them, the
// nearer with the larger probability, so that the mean is the number itself and small updates of
// bf16 weights are not lost (Gupta et al. 2015, "Deep learning with limited numerical precision").
//
// An fp32 has 16 bits more of mantissa than a bf16: 16 random bits are added to them, and they are
// cut off. So the probability of rounding up is exactly the distance to the lower neighbour in 1 /
// 65536 of theirs; a bf16 number and an infinity stay themselves; a negative number is rounded by
// its magnitude, which is what keeps both signs unbiased. Above the largest finite bf16, 3.39e38,
// the upper neighbour is infinity, as if it were 2^128. A NaN becomes the one of low_precision.h.
//
// The bits are the same on the CPU and on CUDA, for any number of threads.
// On CUDA the work is queued on the device's current stream. On the meta device the arguments are
// checked and nothing is done. Throws c10::Error when a tensor or place is not as described.
#pragma once

#include <ATen/core/Tensor.h>

#include "optim/rounding_place.h"

namespace zeropage::optim {

// from: fp32 [numel], to: bf16 [numel]; flat, contiguous, on one device, without overlap.
void round_stochastically(const at::Tensor& from, const at::Tensor& to, const RoundingPlace& place);

}  // namespace zeropage::optim

// fp32 values that follow what somebody wrote to their copy.
//
// Throws c10::Error when the tensors are not as described. Threads: any; on the CPU the work
// is shared by the threads of optim/parallel.h. Elsewhere it is queued on the current stream, in
// temporaries of the copy's size.
#pragma once

#include <ATen/core/Tensor.h>

namespace zeropage::optim {

// values: fp32 [numel]. copy: [numel], flat, bf16, fp16 or fp32, on the same device: once `values`,
// rounded. An element of the copy that is something else by now becomes the value; the others keep
// their lower bits.
void adopt_copy(const at::Tensor& values, const at::Tensor& copy);

}  // namespace zeropage::optim

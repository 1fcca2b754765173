// The values of a parameter that tensor_parallel() cut (zero/tensor_parallel.h), as tensors that any operator takes.
//
// Threads: the training thread.
#pragma once

#include <ATen/core/TensorBody.h>

namespace zeropage {

// The whole parameter, of all ranks of the group, without gradients. Collective for a parameter that was cut; of
// another it is a copy. It may also be the gradient of one, p.grad(), and what detach() or an elementwise operator made
// of either. Both functions throw for an undefined tensor.
at::Tensor whole_of(const at::Tensor& parameter);

// A copy of what this rank has of it.
at::Tensor own_slice(const at::Tensor& parameter);

}  // namespace zeropage

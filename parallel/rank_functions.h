// The four functions under tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): what passes between ranks
// in forward, and its counterpart in backward.
//
//                        forward                     backward
//   copy_to_ranks        nothing                     sum of the ranks' gradients
//   reduce_from_ranks    sum of the ranks' tensors   nothing
//   split_to_ranks       this rank's slice           gather of the gradients' slices
//   gather_from_ranks    gather of the slices        this rank's slice of the gradient
//
// Each takes what all ranks hold alike to what each holds a part of, or back. So the gradient of a tensor
// that all ranks hold alike is the same on all ranks, to the bit.
//
// Collective, in the order in which they are called; backward in the reverse order. name: of the layer, for
// errors.
// Tensors: of any sizes, the same on all ranks; split and gather cut the last dimension.
// Errors: as parallel/rank_operators.h.
#pragma once

#include <string>

#include <ATen/core/TensorBody.h>

#include "parallel/ranks.h"
#include "parallel/slices.h"

namespace zeropage::parallel {

at::Tensor copy_to_ranks(const at::Tensor& tensor, const RanksPointer& ranks,
                         const std::string& name);
at::Tensor reduce_from_ranks(const at::Tensor& tensor, const RanksPointer& ranks,
                             const std::string& name);
at::Tensor split_to_ranks(const at::Tensor& tensor, const Slices& slices, const RanksPointer& ranks,
                          const std::string& name);
at::Tensor gather_from_ranks(const at::Tensor& slice, const Slices& slices,
                             const RanksPointer& ranks, const std::string& name);

}  // namespace zeropage::parallel

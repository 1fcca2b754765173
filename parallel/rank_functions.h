// The functions under tensor parallelism (Shoeybi et al., "Megatron-LM", 2019) and sequence parallelism
// (Korthikanti et al. 2022): what passes between ranks in forward, and its counterpart in backward.
//
//                        forward                         backward
//   copy_to_ranks        nothing                         sum of the ranks' gradients
//   reduce_from_ranks    sum of the ranks' tensors       nothing
//   split_to_ranks       this rank's slice               gather of the gradients' slices
//   gather_from_ranks    gather of the slices            this rank's slice of the gradient
//   gather_to_ranks      gather of the slices            this rank's slice of the gradients' sum
//   scatter_from_ranks   this rank's slice of the sum    gather of the gradients' slices
//
// The first four take what all ranks hold alike to what each holds a part of, or back. So the gradient of a
// tensor that all ranks hold alike is the same on all ranks, to the bit. The last two are for a tensor of
// which each rank holds a slice on both sides of a layer: gather_to_ranks comes before what each rank
// computes in part, such as a column-parallel layer, and scatter_from_ranks adds up such parts.
//
// Collective, in the order in which they are called; backward in the reverse order. name: of the layer, for
// errors.
// Tensors: of any sizes, the same on all ranks except for a slice's dimension `dim`, which `slices` tells.
// Errors: as parallel/rank_operators.h.
#pragma once

#include <cstdint>
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
                          const std::string& name, int64_t dim = -1);
at::Tensor gather_from_ranks(const at::Tensor& slice, const Slices& slices,
                             const RanksPointer& ranks, const std::string& name, int64_t dim = -1);
at::Tensor gather_to_ranks(const at::Tensor& slice, const Slices& slices, const RanksPointer& ranks,
                           const std::string& name, int64_t dim);
at::Tensor scatter_from_ranks(const at::Tensor& tensor, const Slices& slices,
                              const RanksPointer& ranks, const std::string& name, int64_t dim);

}  // namespace zeropage::parallel

// The two sides of linear layers between which the sequence is whole, and cut outside (zeropage/parallel_layers.h).
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/TensorBody.h>

#include "zeropage/detail/slices.h"

namespace zeropage::parallel::detail {

// What of a sequence a tensor has.
enum class Sequence : uint8_t { kWhole, kSlice };

// How the sequence in dimension `dim` of the tensor is cut. Throws where that is no dimension before the
// features, or the ranks do not divide the sequence's length. name: for errors.
Slices sequence_slices(const at::Tensor& tensor, int64_t dim, Sequence of,
                       const RanksPointer& ranks, const std::string& name);

// at::linear of the gathered slices. Backward keeps the slice and gathers it again for the weight's gradient:
// the whole input would be as large as without sequence parallelism. bias: may be undefined.
at::Tensor linear_of_gathered(const at::Tensor& slice, const at::Tensor& weight,
                              const at::Tensor& bias, int64_t dim, const RanksPointer& ranks,
                              const std::string& name);

// This rank's slice of the sum of `partial` over ranks, and the bias on top, which is whole on all ranks. Its
// gradient takes no message, since backward gathers the gradients of all tokens. bias: may be undefined.
at::Tensor scattered_sum(const at::Tensor& partial, const at::Tensor& bias, int64_t dim,
                         const RanksPointer& ranks, const std::string& name);

}  // namespace zeropage::parallel::detail

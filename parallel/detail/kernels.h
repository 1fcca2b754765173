// What the operators of parallel/rank_operators.h run.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/TensorBody.h>

#include "zeropage/detail/slices.h"

namespace zeropage::parallel::detail {

// Throws in a backward that is to be differentiated. who: the operator.
void refuse_second_derivative(const char* who, const std::string& name);

at::Tensor compute_all_reduce(const at::Tensor& tensor, int64_t op, const RanksPointer& ranks,
                              const std::string& name);
at::Tensor compute_all_gather(const at::Tensor& slice, at::IntArrayRef sizes, int64_t dim,
                              const RanksPointer& ranks, const std::string& name);
at::Tensor compute_reduce_scatter(const at::Tensor& tensor, at::IntArrayRef sizes, int64_t dim,
                                  const RanksPointer& ranks, const std::string& name);

std::tuple<at::Tensor, at::Tensor, at::Tensor> compute_batch_norm_statistics(
    const at::Tensor& input, const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var, double momentum, const RanksPointer& ranks,
    const std::string& name);
}  // namespace zeropage::parallel::detail

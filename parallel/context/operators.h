// Operators of a context axis, registered with LibTorch's dispatcher under zeropage::, as those of
// parallel/rank_operators.h are, and for the same reason.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/TensorBody.h>

#include "zeropage/detail/slices.h"

namespace zeropage::parallel::context {

// documents: of this rank, [batch, length], int64. Returns the output and log_sum (parallel/context/blocks.h).
std::tuple<at::Tensor, at::Tensor> ring_forward(const at::Tensor& query, const at::Tensor& key,
                                                const at::Tensor& value,
                                                const std::optional<at::Tensor>& documents,
                                                double scale, bool is_causal,
                                                const RanksPointer& ranks, const std::string& name);
// The gradients of query, key and value.
std::tuple<at::Tensor, at::Tensor, at::Tensor> ring_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& output, const at::Tensor& log_sum,
    const std::optional<at::Tensor>& documents, double scale, bool is_causal,
    const RanksPointer& ranks, const std::string& name);

// [batch, heads, length / P, size] of this rank's tokens to [batch, heads / P, length, size] of its heads, the tokens in their
// order, or back. P divides heads.
at::Tensor exchange_heads(const at::Tensor& given, bool to_heads, const RanksPointer& ranks,
                          const std::string& name);

// The tensors of all ranks, in the order of their ranks: [ranks, sizes]. tensor: of the same sizes on all.
at::Tensor gather_alike(const at::Tensor& tensor, const RanksPointer& ranks,
                        const std::string& name);

}  // namespace zeropage::parallel::context

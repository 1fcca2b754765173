// Operators whose ranks work together, registered with LibTorch's dispatcher under zeropage::.
//
// They are operators and not functions, so that whatever sees operators sees them: a checkpointed region
// repeats them with the rest of its function, and a Recompute records them. It does not run them
// again: their results stay, because another rank may have decided otherwise.
//
// Every rank calls the same ones in the same order, in backward too. `name` goes into the collective: ranks
// that are at different layers end with an error that names both (comm/README.md).
//
// Threads: as the communicator's, one at a time; backward runs on the thread that called it, for
// tensors on the host.
// Errors: the communicator's. A backward that is to be differentiated itself is refused.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/TensorBody.h>

#include "zeropage/detail/slices.h"

namespace zeropage::parallel {

// Makes Ranks a type that schemas may name. Each library of operators calls it before it names the type, since nobody knows
// which is registered first.
void register_ranks();

// ---- collectives; what they are differentiated to is in zeropage/parallel_layers.h ----

// The sum or the maximum over ranks, element by element. tensor: of the same sizes on all ranks.
at::Tensor all_reduce(const at::Tensor& tensor, comm::ReduceOp op, const RanksPointer& ranks,
                      const std::string& name);
// The ranks' slices behind each other in dimension `dim`. sizes: of that dimension, by rank.
at::Tensor all_gather(const at::Tensor& slice, at::IntArrayRef sizes, int64_t dim,
                      const RanksPointer& ranks, const std::string& name);
// This rank's slice of the sum over ranks. tensor: of the same sizes on all ranks.
at::Tensor reduce_scatter(const at::Tensor& tensor, at::IntArrayRef sizes, int64_t dim,
                          const RanksPointer& ranks, const std::string& name);

// ---- batch norm (zeropage/parallel_layers.h) ----

// Statistics of input [batch, channels, ...] over the batches of all ranks: mean and biased variance, both [channels],
// and the number of values of a channel, [1], in double precision. Updates the running statistics that are
// defined. input: without a gradient.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_statistics(
    const at::Tensor& input, const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var, double momentum, const RanksPointer& ranks,
    const std::string& name);

}  // namespace zeropage::parallel

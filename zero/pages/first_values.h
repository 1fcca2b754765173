// How every rank gets rank 0's values of a storage, before these are in its page.
//
// What ranks keep whole is broadcast. Of a sharded page each rank gets its shard alone, down a binomial tree in which a
// rank passes on what those below it keep. So each byte leaves rank 0 once, in log2(N) messages a storage, and into no buffer: a rank
// receives where its own values were.
#pragma once

#include <ATen/core/TensorBody.h>

#include "zero/pages/parameter_pages.h"

namespace zeropage::zero {

// values: [numel of the storage]; what this rank keeps of them becomes rank 0's, and the rest is of no meaning then. Collective
// over the ranks that have the page's parameters, and over the tensor-parallel group.
void bring_first_values(const ParameterPages& pages, size_t storage, const at::Tensor& values);

}  // namespace zeropage::zero

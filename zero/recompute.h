// Recompute (checkpointing/recompute.h) for a model that several ranks train.
//
//   auto recompute =
//       zeropage::recompute(model, zeropage::checkpointing::RecomputeOptions::budget(6_GiB));
//   for (auto& batch : *loader) {
//     torch::Tensor loss;
//     {
//       const zeropage::ActivationScope forward(recompute);
//       loss = criterion(model(batch.data), batch.target);
//     }
//     loss.backward();
//     ...
//
// The ranks repeat the same operators, because they use what rank 0 measures and plans. Otherwise a rank of a model
// with sharded parameters would gather pages that other ranks do not.
#pragma once

#include "checkpointing/recompute.h"

namespace zeropage {

class DistributedDataParallelBase;

// options: their `device` becomes the model's, and `agree`, unless it is set, a broadcast over the
// model's ranks. Give ranks the same options, and batches of the same shapes.
// Lifetime: may outlive the model, not the use of its ranks.
// Collective: a scope of a budget, where there are several ranks: a broadcast of 8 bytes, and
// of the plan, one byte a value of the forward, when there is a new one.
// Throws c10::Error on a budget below 1 byte; later what its scopes throw.
checkpointing::Recompute recompute(const DistributedDataParallelBase& model,
                                   checkpointing::RecomputeOptions options);

}  // namespace zeropage

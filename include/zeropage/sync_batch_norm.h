// Batch norms that see the batches of all ranks, without a change to the module.
//
//   zeropage::sync_batch_norm(net, world);
//   zeropage::DistributedDataParallel<Net> model(net, world, options);
//
// C++ modules cannot be exchanged in place: forward() is not virtual, and members have their type. So what
// is changed is not the module but a tensor of each torch::nn::BatchNorm1d, 2d and 3d in it: the tensor gets
// a mark, and the trap (paging/trap.h), which sees every operator on it, runs zeropage/parallel_layers.h in place
// of a training aten::batch_norm. Call it before or after wrapping, at any stage; it works in checkpointed
// regions and under a Recompute too.
//
// What stays LibTorch's: eval mode, so a rank may evaluate alone; worlds of one rank; and a BatchNorm1d whose
// batch on this rank is a single row, which its forward refuses before any operator runs
// (parallel::SyncBatchNorm takes it).
//
// The mark lies on the tensor. ->to() would take it away and is refused afterwards: move the module first.
// A clone() of the module has no marks. A layer whose weight is replaced by another tensor has none either.
#pragma once

#include <cstddef>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "zeropage/world.h"

namespace zeropage {

// Returns how many layers it marked. The module holds the world from then on. Collective: ranks agree on
// the layers first.
// Throws on all ranks alike if there is no BatchNorm, if one has no tensor that could carry a mark (neither
// affine nor running statistics: use parallel::SyncBatchNorm there), or if one is marked already.
size_t sync_batch_norm(torch::nn::Module& module, const comm::World& world);
// The same for a holder, such as `Net net;` with TORCH_MODULE(Net).
template <typename Contained>
size_t sync_batch_norm(const torch::nn::ModuleHolder<Contained>& holder, const comm::World& world) {
  return sync_batch_norm(*holder.ptr(), world);
}

}  // namespace zeropage

// Activations on the host from forward to backward, without a change to any module.
//
//   checkpointing::ActivationOffload offload;
//   for (...) {
//     at::Tensor loss;
//     {
//       const checkpointing::ActivationScope forward(offload);
//       loss = criterion(model(input), target);       // what autograd saves leaves
//     }
//     loss.backward();                                // and comes back where a node needs it
//   }
//
// What leaves: strided tensors from least_bytes on, with the memory that they lie in (their extent,
// or all of a storage that they have holes in), once for all tensors that are saved of it. What
// stays is kept as without hooks: leaves that require a gradient and views of them, sharded
// parameters, what stay_here() was told, and what is not a plain tensor. Within or around the scope of
// a Recompute, what that drops does not leave.
//
// On an accelerator a copy runs on a stream of its own to page-locked memory, and the source goes
// when it has ended. Backward brings a tensor back on another stream, and then those that were saved
// before it, as far ahead as staging_bytes allows. On the host the copies run in the caller, when they are needed.
// What the program still holds is not brought back but
// used (only if it is not compressed, so that bits do not depend on time).
//
// With a store (ActivationOffloadOptions) copies are passed from the host to the store, and read ahead of their
// use.
//
// Bytes: copies are kActivationOffloaded on the host, what is brought back kActivation, of the
// ledger that is current where the ActivationOffload is made.
//
// A tensor that was changed in place after it was saved is refused in backward, as without hooks: on
// an accelerator its copy may have been under way. What LibTorch does not count as a change (through
// data(), or another tensor on the same memory) is not seen, and may be taken for the first values.
//
// Lifetime: see checkpointing/activation_scope.h; hooks may outlive it too. A copy goes with the last PackedTensor that needs it:
// when backward has run, or its graph is dropped.
// Threads: any; one thread may pack while another is in backward. Backward of an accelerator runs on
// the streams of its forward, as autograd has it.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "checkpointing/activation_offload_options.h"
#include "checkpointing/activation_scope.h"
#include "checkpointing/saved_tensors.h"

namespace zeropage::checkpointing {

namespace detail {
class ActivationOffloader;
}

class ActivationOffload : public ActivationPolicy {
 public:
  // Throws if an option makes no sense.
  explicit ActivationOffload(const ActivationOffloadOptions& options = {});
  ~ActivationOffload() override;

  // For hooks of your own that pass tensors to it, and for PartitionOptions::onward.
  std::shared_ptr<SavedTensorHooks> hooks() const;

  // Names tensors that the program holds anyway and saves without a gradient: frozen parameters, buffers. Tensors
  // that are not named give right results too, but are copied.
  void stay_here(const std::vector<at::Tensor>& tensors);

  ActivationOffloadStatistics statistics() const;

 private:
  std::unique_ptr<Forward> begin_forward() override;

  const std::shared_ptr<detail::ActivationOffloader> offloader_;
};

}  // namespace zeropage::checkpointing

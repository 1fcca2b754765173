// The scope in which activations of a forward are recomputed, offloaded or cut: one for all policies.
//
//   checkpointing::Recompute recompute(checkpointing::RecomputeOptions::selective());
//   checkpointing::ActivationOffload offload;
//   for (auto& batch : *loader) {
//     torch::Tensor loss;
//     {
//       const checkpointing::ActivationScope dropping(recompute);
//       const checkpointing::ActivationScope leaving(offload);
//       loss = criterion(model(batch.data), batch.target);
//     }
//     loss.backward();
//     ...
//
// A policy is made once, from its options, and says in statistics() what it has done. A scope of it is
// around a forward and its loss, not around backward. What is saved outside of scopes is kept as
// without them.
//
// Scopes nest. Recompute and offload compose in either order: what recompute drops is dropped, and what
// it keeps goes where the offload puts it. A region (checkpointing/checkpoint.h) within passes its inputs on in the
// same way. If two scopes of the same kind nest, the inner one decides.
//
// Lifetime: a policy outlives its scopes; graphs live on without it.
// Threads: a scope concerns the calling thread. Backward may run on any.
// Errors: a policy's constructor throws c10::Error, with the class's name, where an option makes no
// sense. Backward throws where a tensor that it needs was changed in place since the forward.
#pragma once

#include <memory>

#include "checkpointing/saved_tensors.h"

namespace zeropage::checkpointing {

// What decides over activations: Recompute, ActivationOffload, PartitionedCheckpoints.
class ActivationPolicy {
 public:
  ActivationPolicy() = default;
  ActivationPolicy(const ActivationPolicy&) = delete;
  ActivationPolicy& operator=(const ActivationPolicy&) = delete;
  virtual ~ActivationPolicy() = default;

 protected:
  // One forward under the policy, for as long as it lives.
  class Forward {
   public:
    virtual ~Forward() = default;
  };
  // One whose saved tensors go to `hooks`.
  static std::unique_ptr<Forward> forward_through(std::shared_ptr<SavedTensorHooks> hooks);

 private:
  friend class ActivationScope;
  // Null if there is nothing to decide.
  virtual std::unique_ptr<Forward> begin_forward() = 0;
};

class ActivationScope {
 public:
  explicit ActivationScope(ActivationPolicy& policy) : forward_(policy.begin_forward()) {}
  ActivationScope(const ActivationScope&) = delete;
  ActivationScope& operator=(const ActivationScope&) = delete;

 private:
  const std::unique_ptr<ActivationPolicy::Forward> forward_;
};

}  // namespace zeropage::checkpointing

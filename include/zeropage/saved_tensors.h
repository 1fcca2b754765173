// `ActivationScope` and hooks on what autograd saves for backward.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

// What happens to tensors that autograd saves for backward: hooks for C++, in a scope, without a
// change to any module.
//
//   auto hooks = std::make_shared<MyHooks>();           // a SavedTensorHooks
//   at::Tensor loss;
//   {
//     checkpointing::SavedTensorScope scope(hooks);
//     loss = criterion(model(input), target);           // each saved tensor goes to hooks->pack()
//   }
//   loss.backward();                                    // and comes from PackedTensor::unpack()
//
// LibTorch's own hooks (torch.autograd.graph.saved_tensors_hooks) take Python objects alone. Its
// engine asks a virtual function for them, and the engine may be replaced: saved_tensors.cpp is the
// one place that knows. The replacement happens before main() in programs that use a scope anywhere,
// since autograd's threads belong to one engine; a self-check runs when the first scope begins.
//
// These are hooks of your own. Ours are used through an ActivationScope (zeropage/saved_tensors.h).
//
// Scopes nest; the innermost one packs. They hold for the calling thread, and for what autograd
// saves on its own threads in a backward with create_graph that the calling thread begins within
// the scope.
//
// Lifetime: a graph owns its PackedTensors, and a scope its hooks.
// Threads: pack() is called by the thread that saves, unpack() by the one that runs the backward
// node; a PackedTensor may be unpacked by several at once if several backwards share its graph.
// Errors: what pack() and unpack() throw, the operator and backward() throw. A LibTorch whose
// engine behaves otherwise, and a process with Python's engine, is refused by the first scope.

namespace zeropage::checkpointing {

// Stands in a graph for a saved tensor.
class PackedTensor {
 public:
  PackedTensor() = default;
  PackedTensor(const PackedTensor&) = delete;
  PackedTensor& operator=(const PackedTensor&) = delete;
  virtual ~PackedTensor() = default;

  // The tensor's values, in its geometry, without a graph. Called whenever backward needs it, which
  // with retain_graph is several times.
  virtual at::Tensor unpack() = 0;
};

class SavedTensorHooks {
 public:
  SavedTensorHooks() = default;
  SavedTensorHooks(const SavedTensorHooks&) = delete;
  SavedTensorHooks& operator=(const SavedTensorHooks&) = delete;
  virtual ~SavedTensorHooks() = default;

  // tensor: as the operator has it, with its graph. What is kept of it must be detached: an output
  // would own the node that owns the PackedTensor. Must not change it.
  virtual std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) = 0;

  // The hooks that keep whole storages for these, without a look at the tensors in them; null: these take each tensor by
  // itself.
  virtual std::shared_ptr<SavedTensorHooks> place_of_storages() { return nullptr; }
  // For hooks that decide what is kept, and not where: hooks like these that pass what they keep to `place`. Null:
  // hooks that keep tensors themselves, which an inner scope replaces.
  virtual std::shared_ptr<SavedTensorHooks> handing_on_to(
      std::shared_ptr<SavedTensorHooks> /*place*/) const {
    return nullptr;
  }
};

// While it lives, autograd's saved tensors of the calling thread go to `hooks`; null: they are
// saved as without any scope.
class SavedTensorScope {
 public:
  explicit SavedTensorScope(std::shared_ptr<SavedTensorHooks> hooks);

  // The hooks of the innermost scope of the calling thread; null without one.
  static std::shared_ptr<SavedTensorHooks> current();

 private:
  const c10::DebugInfoGuard carried_;
};

// The tensor as it is, kept by a handle; unpack() throws if it was changed in place since, as
// autograd does for tensors without hooks. who: begins that error; empty: "a saved tensor".
std::unique_ptr<PackedTensor> keep(const at::Tensor& tensor, std::string who = "");

// Packs the tensor by `hooks`, or keeps it if they are null.
std::unique_ptr<PackedTensor> pack_with(const std::shared_ptr<SavedTensorHooks>& hooks,
                                        const at::Tensor& tensor, std::string who = "");

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
// it keeps goes where the offload puts it. A region (zeropage/checkpoint.h) within passes its inputs on in the
// same way. If two scopes of the same kind nest, the inner one decides.
//
// Lifetime: a policy outlives its scopes, and stays where it is while one lives; graphs live on without it. Policies
// move: what was moved from may only be destroyed or assigned to.
// Threads: a scope concerns the calling thread. Backward may run on any.
// Errors: a policy's constructor throws c10::Error, with the class's name, where an option makes no
// sense. Backward throws where a tensor that it needs was changed in place since the forward.
// What decides over activations: Recompute, ActivationOffload, PartitionedCheckpoints.
class ActivationPolicy {
 public:
  virtual ~ActivationPolicy() = default;

 protected:
  ActivationPolicy() = default;
  ActivationPolicy(ActivationPolicy&&) noexcept = default;
  ActivationPolicy& operator=(ActivationPolicy&&) noexcept = default;

  // One forward under the policy, for as long as it lives.
  class Forward {
   public:
    virtual ~Forward() = default;
  };
  static void check_not_moved_from(bool has_state, const char* policy);
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

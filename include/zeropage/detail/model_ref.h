// What functions of this library take as a model, wherever its parameters are: in a DistributedDataParallel, or in an Optimizer
// without one (zeropage/optimizer.h), which stands for the parameters that it was given.
//
//   zeropage::clip_grad_norm_(model, 1.0);      // a wrapped model's
//   zeropage::clip_grad_norm_(optimizer, 1.0);  // those of a plain module
//
// Files have names and buffers, so functions that read or write them take the module beside the optimizer:
//
//   zeropage::save_state("run/step-1000", net, optimizer);
//
// Lifetime: shares the pages, so the wrapper or the optimizer may go first; a plain module outlives it.
// Threads: the training thread.
#pragma once

#include <memory>

#include <torch/nn/module.h>

namespace zeropage::zero {
class ModelParts;
}  // namespace zeropage::zero

namespace zeropage {

class DistributedDataParallelBase;
class ShardedOptimizer;

class ModelRef {
 public:
  ModelRef(const DistributedDataParallelBase& model);
  // All parameters that it was given, or of the model that it was made of. Of those that it was given, names are
  // "parameter 0", "parameter 1", ..., in the order of its groups.
  ModelRef(const ShardedOptimizer& optimizer);
  // The same under the module's names. Throws where the optimizer has parameters that are none of the module's or is one
  // of a wrapped model, and where another optimizer has some of the module's.
  ModelRef(const torch::nn::Module& module, const ShardedOptimizer& optimizer);

  const zero::ModelParts* operator->() const { return parts_.get(); }

 private:
  const std::shared_ptr<const zero::ModelParts> parts_;
};

// The module of a model whose optimizer is given beside it: wrapped, or the plain module that the optimizer alone steps, as
// an object, a module holder (TORCH_MODULE) or a std::shared_ptr.
class TrainedModule {
 public:
  TrainedModule(const DistributedDataParallelBase& model) : wrapped_(&model) {}
  TrainedModule(const torch::nn::Module& module) : plain_(&module) {}
  template <typename Holder>
  requires requires(const Holder& holder) { static_cast<const torch::nn::Module&>(*holder); }
  TrainedModule(const Holder& module) : plain_(&*module) {}

  ModelRef with(const ShardedOptimizer& optimizer) const;

 private:
  const DistributedDataParallelBase* wrapped_ = nullptr;
  const torch::nn::Module* plain_ = nullptr;
};

}  // namespace zeropage

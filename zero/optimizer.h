// The optimizer that users name: a torch::optim class with its state sharded over ranks.
//
//   zeropage::Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(3e-4));
//
// or, for a script with nothing else of ours, ZeRO-1 in one line:
//
//   zeropage::Optimizer<torch::optim::AdamW> optimizer(
//       net->parameters(), zeropage::World::from_environment(), torch::optim::AdamWOptions(3e-4));
//
// At construction every rank then takes rank 0's parameters, and each backward averages the gradients over the ranks, as it does
// for a wrapped model: p.grad() is the mean for who clips or reads it. What takes a wrapped model elsewhere takes this
// optimizer, or the plain module and this optimizer (zero/model_ref.h). It does not know the module: buffers, such as running
// statistics, stay each rank's own, and a saved state has rank 0's.
#pragma once

#include <utility>
#include <vector>

#include <c10/util/Type.h>

#include "zero/distributed_data_parallel.h"
#include "zero/optimizer_traits.h"
#include "zero/sharded_optimizer.h"

namespace zeropage {

template <typename A>
class Optimizer final : public ShardedOptimizer {
  static_assert(OptimizerTraits<A>::kElementWise,
                "zeropage::Optimizer<A>: A's update is not known to be element-wise, so its state "
                "cannot be sharded: a rank would update a part of a parameter as if it were all of "
                "it. torch::optim::LBFGS is such a class; use torch::optim::LBFGS itself on one "
                "rank. For a class of your own that is element-wise, specialize "
                "zeropage::OptimizerTraits<A> (zero/optimizer_traits.h)");

 public:
  using AlgorithmOptions = typename OptimizerTraits<A>::Options;

  // All parameters of the wrapped module in one group.
  template <typename M>
  Optimizer(DistributedDataParallel<M>& model, AlgorithmOptions defaults = {})
      : Optimizer(model, Groups{{model.parameters()}}, std::move(defaults)) {}

  // The user's groups; a group without options takes the defaults.
  template <typename M>
  Optimizer(DistributedDataParallel<M>& model, const Groups& groups, AlgorithmOptions defaults = {})
      : ShardedOptimizer(model, groups, algorithm(defaults)) {}

  // Without a wrapped module: stages 0 and 1. Parameters may be frozen and unfrozen between two steps, on all ranks alike.
  Optimizer(const std::vector<at::Tensor>& parameters, const comm::World& world,
            AlgorithmOptions defaults = {}, const Options& options = {})
      : Optimizer(Groups{{parameters}}, world, std::move(defaults), options) {}

  Optimizer(const Groups& groups, const comm::World& world, AlgorithmOptions defaults = {},
            const Options& options = {})
      : ShardedOptimizer(world, options, groups, algorithm(defaults)) {}

 private:
  static Algorithm algorithm(const AlgorithmOptions& defaults) {
    Algorithm algorithm{
        .class_name = c10::demangle_type<A>(),
        .make_class_optimizer =
            [defaults](Groups shards) { return std::make_unique<A>(std::move(shards), defaults); },
        .fused = nullptr,
        .defaults = std::make_unique<AlgorithmOptions>(defaults),
        .option_bytes = sizeof(AlgorithmOptions)};
    if constexpr (kHasFusedForm<A>) algorithm.fused = detail::fused_form(defaults);
    return algorithm;
  }
};

}  // namespace zeropage

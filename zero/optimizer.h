// The optimizer that users name: a torch::optim class with its state sharded over ranks.
//
//   zeropage::Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(3e-4));
//
// or, for a script with nothing else of ours, ZeRO-1 in one line:
//
//   zeropage::Optimizer<torch::optim::AdamW> optimizer(
//       model->parameters(), zeropage::comm::World::from_environment(),
//       torch::optim::AdamWOptions(3e-4));
//
// step() then also averages the gradients over the ranks, and at construction every rank takes rank
// 0's parameters.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <c10/util/Type.h>

#include "zero/distributed_data_parallel.h"
#include "zero/optimizer_traits.h"
#include "zero/update/fused_update.h"
#include "zero/update/sharded_optimizer.h"

namespace zeropage {

template <typename A>
class Optimizer final : public ShardedOptimizer {
  static_assert(OptimizerTraits<A>::kElementWise,
                "zeropage::Optimizer<A>: A's update is not known to be element-wise, so its state "
                "cannot be sharded: "
                "a rank would update a part of a parameter as if it were all of it. "
                "torch::optim::LBFGS is such a "
                "class; use torch::optim::LBFGS itself on one rank. For a class of your own that "
                "is element-wise, "
                "specialize zeropage::OptimizerTraits<A> (zero/optimizer_traits.h)");

 public:
  using AlgorithmOptions = typename OptimizerTraits<A>::Options;

  // All parameters of the wrapped module in one group.
  template <typename M>
  Optimizer(DistributedDataParallel<M>& model, AlgorithmOptions defaults = {})
      : Optimizer(model.sharded_parameters(), {{model.parameters()}}, std::move(defaults)) {}

  // The user's groups; a group without options takes the defaults.
  template <typename M>
  Optimizer(DistributedDataParallel<M>& model, const Groups& groups, AlgorithmOptions defaults = {})
      : Optimizer(model.sharded_parameters(), groups, std::move(defaults)) {}

  // Without a wrapped module.
  Optimizer(const std::vector<at::Tensor>& parameters, const comm::World& world,
            AlgorithmOptions defaults = {}, const Options& options = {})
      : Optimizer(Groups{{parameters}}, world, std::move(defaults), options) {}

  Optimizer(const Groups& groups, const comm::World& world, AlgorithmOptions defaults = {},
            const Options& options = {})
      : Optimizer(shard_bare_parameters(all_of(groups), world, options), groups,
                  std::move(defaults)) {}

 private:
  Optimizer(ShardedParameters parameters, const Groups& groups, AlgorithmOptions defaults)
      : ShardedOptimizer(std::move(parameters), groups,
                         std::make_unique<AlgorithmOptions>(defaults), algorithm(defaults)) {}

  static Algorithm algorithm(const AlgorithmOptions& defaults) {
    Algorithm algorithm{c10::demangle_type<A>(), [defaults](Groups shards) {
                          return std::make_unique<A>(std::move(shards), defaults);
                        }};
    if constexpr (kHasFusedForm<A>) {
      algorithm.states = static_cast<int64_t>(offload::state_names(defaults).size());
      algorithm.make_fused = [](OwnedPart part) {
        return std::make_unique<FusedUpdate<AlgorithmOptions>>(std::move(part));
      };
    }
    return algorithm;
  }

  static std::vector<at::Tensor> all_of(const Groups& groups) {
    std::vector<at::Tensor> tensors;
    for (const auto& group : groups) {
      tensors.insert(tensors.end(), group.params().begin(), group.params().end());
    }
    return tensors;
  }
};

}  // namespace zeropage

// `Optimizer`: the wrapper of an optimizer of `torch::optim`, with or without a wrapped module.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "zeropage/detail/update_reads.h"
#include "zeropage/distributed_data_parallel.h"
#include "zeropage/lion.h"
#include "zeropage/options.h"
#include "zeropage/world.h"

namespace zeropage::zero {
struct FusedForm;
struct ShardedModel;
class ShardedUpdates;
}  // namespace zeropage::zero

// What Zeropage must know of an optimizer class to shard its state.
//
// An update is element-wise when an element's new value depends on that element's value, gradient
// and state alone. Then it may run on any part of a parameter, and gives the same bits as on the
// whole. Others read more: zeropage::Adafactor, zeropage::Lamb and zeropage::Muon, and those of your own
// (zeropage/tensor_update.h).
//
// For an element-wise class of your own, with the constructor A(std::vector<OptimizerParamGroup>, Options):
//
//   template <>
//   struct zeropage::OptimizerTraits<MyOptimizer> {
//     using Options = MyOptimizerOptions;
//     static constexpr UpdateReads kReads = UpdateReads::kElement;
//   };

namespace zeropage {

class Adafactor;         // zeropage/adafactor.h
class Lamb;              // zeropage/lamb.h
class Muon;              // zeropage/muon.h
class TensorUpdateBase;  // zeropage/tensor_update.h

template <typename A>
struct OptimizerTraits {
  using Options = torch::optim::OptimizerOptions;
  static constexpr UpdateReads kReads = UpdateReads::kModel;
};

namespace detail {
template <typename O>
struct ElementWise {
  using Options = O;
  static constexpr UpdateReads kReads = UpdateReads::kElement;
};
}  // namespace detail

template <>
struct OptimizerTraits<torch::optim::SGD> : detail::ElementWise<torch::optim::SGDOptions> {};
template <>
struct OptimizerTraits<torch::optim::Adam> : detail::ElementWise<torch::optim::AdamOptions> {};
template <>
struct OptimizerTraits<torch::optim::AdamW> : detail::ElementWise<torch::optim::AdamWOptions> {};
template <>
struct OptimizerTraits<torch::optim::Adagrad> : detail::ElementWise<torch::optim::AdagradOptions> {
};
template <>
struct OptimizerTraits<torch::optim::RMSprop> : detail::ElementWise<torch::optim::RMSpropOptions> {
};
template <>
struct OptimizerTraits<Lion> : detail::ElementWise<LionOptions> {};
// Its update searches along a line through all parameters at once: a part of it has no meaning.
template <>
struct OptimizerTraits<torch::optim::LBFGS> {
  using Options = torch::optim::LBFGSOptions;
  static constexpr UpdateReads kReads = UpdateReads::kModel;
};

// An update of A's formulas in one pass over memory (UpdateBy::kFused).

namespace detail {

template <typename... Classes>
struct ClassList {
  template <typename A>
  static constexpr bool kHas = (std::is_same_v<A, Classes> || ...);
};

using ClassesWithFusedForm = ClassList<torch::optim::AdamW, torch::optim::Adam, torch::optim::SGD,
                                       torch::optim::Adagrad, Lion, Muon, Lamb, Adafactor>;

// A: one of them.
template <typename A>
std::shared_ptr<const zero::FusedForm> fused_form(
    const typename OptimizerTraits<A>::Options& defaults);

std::shared_ptr<const zero::FusedForm> own_form(
    const std::shared_ptr<const TensorUpdateBase>& update, UpdateReads reads,
    const torch::optim::OptimizerOptions& defaults);

}  // namespace detail

// Whether A has one. By class, not by its options: a class of yours may share them.
template <typename A>
inline constexpr bool kHasFusedForm = detail::ClassesWithFusedForm::kHas<A>;

// The part of zeropage::Optimizer<A> that does not depend on A: it runs a torch::optim class on what this rank owns
// of each page, then shares the result.
//
// It is a torch::optim::Optimizer whose parameters and options are the user's: schedulers,
// per-group options and add_param_group work on it as on any other.
//
// On an accelerator step() enqueues, and returns at once; only the step before must have ended, so
// the host is never more than one ahead.
//
// Lifetime: shares the pages and the reducer with the DistributedDataParallel that made them; either
// may go first.
// Threads: the training thread.

class DistributedDataParallelBase;

class ShardedOptimizer : public torch::optim::Optimizer {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  ~ShardedOptimizer() override;

  // Collective. Averages gradients that backward has not averaged yet, updates what this rank owns,
  // and returns when all whole parameters are new on this rank; sharded ones come when they are
  // used. Returns the closure's loss, or an undefined tensor.
  torch::Tensor step(LossClosure closure = nullptr) override;

  // Gradients accumulate on this rank until the first backward outside the guard, which averages all of them. Call the
  // same on all ranks.
  [[nodiscard]] NoSync no_sync() const;

  const std::string& class_name() const;
  // Steps made, those before a load included. On an accelerator it may wait for the last one.
  int64_t steps();

  // Refused: states lie in shards, not in a map. For new states make a new optimizer. step() throws if the base
  // class's map was written to.
  void state() = delete;

  // Sharded state is not one archive; both throw.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  // What depends on the class A.
  struct Algorithm {
    std::string class_name;  // for errors and for comparing ranks
    std::function<std::unique_ptr<torch::optim::Optimizer>(Groups)> make_class_optimizer;
    std::shared_ptr<const zero::FusedForm> fused;  // null: it has none
    std::unique_ptr<torch::optim::OptimizerOptions> defaults;
    size_t option_bytes = 0;  // of an object of the options' class
  };

  // Collective, both: ranks must agree on groups and options.
  ShardedOptimizer(const DistributedDataParallelBase& model, const Groups& groups,
                   Algorithm algorithm);
  // Without a wrapped module.
  ShardedOptimizer(const comm::World& world, const Options& options, const Groups& groups,
                   Algorithm algorithm);

 private:
  friend zero::ShardedUpdates& updates_of(ShardedOptimizer& optimizer);
  friend const zero::ShardedUpdates& updates_of(const ShardedOptimizer& optimizer);

  // module: null where nothing is wrapped.
  ShardedOptimizer(const zero::ShardedModel& parameters, const torch::nn::Module* module,
                   const Groups& groups, Algorithm algorithm);

  std::unique_ptr<zero::ShardedUpdates> updates_;
};

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
// optimizer, or the plain module and this optimizer (zeropage/detail/model_ref.h). It does not know the module: buffers, such as running
// statistics, stay each rank's own, and a saved state has rank 0's.
template <typename A>
class Optimizer final : public ShardedOptimizer {
  static_assert(OptimizerTraits<A>::kReads == UpdateReads::kElement || kHasFusedForm<A> ||
                    std::derived_from<A, TensorUpdateBase>,
                "zeropage::Optimizer<A>: A's update is not known to be element-wise, so its state "
                "cannot be sharded: a rank would update a part of a parameter as if it were all of "
                "it. torch::optim::LBFGS is such a class; use torch::optim::LBFGS itself on one "
                "rank. For a class of your own that is element-wise, specialize "
                "zeropage::OptimizerTraits<A> (zeropage/optimizer.h)");

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
    Algorithm algorithm{.class_name = c10::demangle_type<A>(),
                        .make_class_optimizer = nullptr,
                        .fused = nullptr,
                        .defaults = std::make_unique<AlgorithmOptions>(defaults),
                        .option_bytes = sizeof(AlgorithmOptions)};
    if constexpr (std::derived_from<A, TensorUpdateBase>) {
      algorithm.fused = detail::own_form(std::make_shared<const A>(), A::kReads, defaults);
    } else {
      algorithm.make_class_optimizer = [defaults](Groups shards) {
        return std::make_unique<A>(std::move(shards), defaults);
      };
    }
    if constexpr (kHasFusedForm<A>) algorithm.fused = detail::fused_form<A>(defaults);
    return algorithm;
  }
};

}  // namespace zeropage

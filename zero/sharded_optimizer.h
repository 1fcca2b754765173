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
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include "comm/world.h"
#include "zero/no_sync.h"
#include "zero/options.h"

namespace zeropage {

class DistributedDataParallelBase;
struct FusedForm;
struct ShardedModel;
class ShardedUpdates;

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
    std::shared_ptr<const FusedForm> fused;  // null: it has none
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
  friend ShardedUpdates& updates_of(ShardedOptimizer& optimizer);
  friend const ShardedUpdates& updates_of(const ShardedOptimizer& optimizer);

  ShardedOptimizer(const ShardedModel& parameters, const Groups& groups, Algorithm algorithm);

  std::unique_ptr<ShardedUpdates> updates_;
};

}  // namespace zeropage

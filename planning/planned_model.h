// A user's model in a simulated world, for plan() (planning/plan.h).
//
// Lifetime: shares the world. Threads: the one that plans.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include <torch/optim/adamw.h>

#include "checkpointing/checkpointed.h"
#include "comm/world.h"
#include "zero/deferred_module.h"
#include "zero/distributed_data_parallel.h"
#include "zero/optimizer.h"
#include "zero/options.h"

namespace zeropage {

// What plan() needs to know of a training script. M: as in DistributedDataParallel<M>.
template <typename M>
struct ModelToPlan {
  // Makes the module, as for a DeferredModule: its parameters get no values. Called several times.
  std::function<M()> construct;
  // Forward and loss of one micro-batch: one element in fp32. Inputs are to be on the meta device.
  std::function<at::Tensor(DistributedDataParallel<M>& model)> loss;
  // Makes regions of that many of the module's blocks (checkpointing/checkpointed.h). Empty: it has
  // none, and CheckpointPolicy::kBlocks is not planned.
  std::function<void(M& module, checkpointing::EveryBlocks every)> checkpoint_blocks;
  // Empty: AdamW.
  std::function<std::unique_ptr<ShardedOptimizer>(DistributedDataParallel<M>& model)> optimizer;
};

namespace detail {

class PlannedModel {
 public:
  PlannedModel() = default;
  PlannedModel(const PlannedModel&) = delete;
  PlannedModel& operator=(const PlannedModel&) = delete;
  virtual ~PlannedModel() = default;

  virtual DistributedDataParallelBase& model() = 0;
  virtual ShardedOptimizer& optimizer() = 0;
  virtual at::Tensor loss() = 0;
  virtual void checkpoint_blocks(checkpointing::EveryBlocks every) = 0;
};

using MakePlannedModel =
    std::function<std::unique_ptr<PlannedModel>(const comm::World& world, const Options& options)>;

template <typename M>
class PlannedModelOf final : public PlannedModel {
 public:
  PlannedModelOf(const ModelToPlan<M>& given, const comm::World& world, const Options& options)
      : given_(given), model_(DeferredModule<M>(given.construct), world, options) {
    optimizer_ = given_.optimizer ? given_.optimizer(model_)
                                  : std::make_unique<Optimizer<torch::optim::AdamW>>(model_);
  }

  DistributedDataParallelBase& model() override { return model_; }
  ShardedOptimizer& optimizer() override { return *optimizer_; }
  at::Tensor loss() override { return given_.loss(model_); }
  void checkpoint_blocks(checkpointing::EveryBlocks every) override {
    given_.checkpoint_blocks(model_.module(), every);
  }

 private:
  const ModelToPlan<M>& given_;
  DistributedDataParallel<M> model_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
};

}  // namespace detail
}  // namespace zeropage

// A rank's pages and their gradients, shared by a wrapped module and its optimizers.
#pragma once

#include <memory>
#include <vector>

#include <torch/nn/module.h>

#include "zero/agreement/rank_agreement.h"
#include "zero/gradients/backward.h"
#include "zero/gradients/step_gradients.h"
#include "zero/layout/module_parameters.h"
#include "zero/norms/norm_sums.h"
#include "zero/pages/make_pages.h"
#include "zero/pages/memory_holders.h"
#include "zero/setup/step_facts.h"
#include "zeropage/options.h"
#include "zeropage/world.h"

namespace zeropage {
class DistributedDataParallelBase;
}  // namespace zeropage

namespace zeropage::memory {
class MemoryLimitScope;
}  // namespace zeropage::memory

namespace zeropage::operators {
class ConstructionTape;
}  // namespace zeropage::operators

namespace zeropage::zero {

struct ShardedModel : PageParts {
  // What all ranks must have alike from step to step.
  std::shared_ptr<RankAgreement> agreement;
  std::shared_ptr<GradientReducer> reducer;
  std::shared_ptr<StepGradients> gradients;
  std::shared_ptr<NormSummer> sums;
  Options options;
  std::shared_ptr<memory::MemoryLimitScope> limits;
  std::shared_ptr<StepFacts> facts;  // for the advice of those limits
  // Who keeps memory for it beside these.
  std::shared_ptr<MemoryHolders> holders = std::make_shared<MemoryHolders>();
};

// Shards a wrapped module, whose gradients are averaged in backward. tape: of a module that was constructed
// without memory, which gets its values; null for others. tensor: the ranks that compute the same samples; none: those
// that the module's slices are over. Collective; every rank takes rank 0's values.
ShardedModel shard_module_parameters(const torch::nn::Module& module, const comm::World& world,
                                     const std::optional<comm::World>& tensor,
                                     const Options& options,
                                     const operators::ConstructionTape* tape);

// Shards parameters that nothing wraps; their gradients are averaged in backward, too. Throws for stages that shard
// gradients or parameters. Collective; every rank takes rank 0's values.
ShardedModel shard_bare_parameters(const std::vector<at::Tensor>& tensors, const comm::World& world,
                                   const Options& options);

}  // namespace zeropage::zero

namespace zeropage {

// Those of a model that is wrapped, as long as it is.
const zero::ShardedModel& sharded_parameters_of(const DistributedDataParallelBase& model);

}  // namespace zeropage

#include "zeropage/detail/model_ref.h"

#include "zero/model_parts.h"
#include "zero/update/sharded_updates.h"
#include "zeropage/distributed_data_parallel.h"
#include "zeropage/optimizer.h"

namespace zeropage {
namespace {

const zero::ShardedModel& sharded_of(const ShardedOptimizer& optimizer) {
  return updates_of(optimizer).parameters();
}

}  // namespace

ModelRef::ModelRef(const DistributedDataParallelBase& model)
    : parts_(std::make_shared<const zero::ModelParts>(sharded_parameters_of(model),
                                                      model.all_ranks(), model.base_)) {}

ModelRef::ModelRef(const ShardedOptimizer& optimizer)
    : parts_(std::make_shared<const zero::ModelParts>(sharded_of(optimizer),
                                                      sharded_of(optimizer).pages->world(),
                                                      /*module=*/nullptr)) {}

ModelRef::ModelRef(const torch::nn::Module& module, const ShardedOptimizer& optimizer)
    : parts_(std::make_shared<const zero::ModelParts>(sharded_of(optimizer), module)) {}

ModelRef TrainedModule::with(const ShardedOptimizer& optimizer) const {
  return wrapped_ != nullptr ? ModelRef(*wrapped_) : ModelRef(*plain_, optimizer);
}

}  // namespace zeropage

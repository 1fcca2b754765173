#include <utility>

#include <torch/serialize/archive.h>

#include "zero/update/fused_update.h"
#include "zero/update/sharded_updates.h"
#include "zeropage/check.h"
#include "zeropage/optimizer.h"

namespace zeropage {
namespace {

std::vector<at::Tensor> all_of(const ShardedOptimizer::Groups& groups) {
  std::vector<at::Tensor> tensors;
  for (const auto& group : groups) {
    tensors.insert(tensors.end(), group.params().begin(), group.params().end());
  }
  return tensors;
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(const DistributedDataParallelBase& model, const Groups& groups,
                                   Algorithm algorithm)
    : ShardedOptimizer(sharded_parameters_of(model), &model.untyped_module(), groups,
                       std::move(algorithm)) {}

ShardedOptimizer::ShardedOptimizer(const comm::World& world, const Options& options,
                                   const Groups& groups, Algorithm algorithm)
    : ShardedOptimizer(zero::shard_bare_parameters(all_of(groups), world, options),
                       /*module=*/nullptr, groups, std::move(algorithm)) {}

ShardedOptimizer::ShardedOptimizer(const zero::ShardedModel& parameters,
                                   const torch::nn::Module* module, const Groups& groups,
                                   Algorithm algorithm)
    : Optimizer(groups, algorithm.defaults->clone()),
      updates_(std::make_unique<zero::ShardedUpdates>(
          parameters, *this,
          zero::UpdateAlgorithm{
              .class_name = std::move(algorithm.class_name),
              .make_class_optimizer = std::move(algorithm.make_class_optimizer),
              .make_fused = algorithm.fused ? algorithm.fused->make : zero::MakePageUpdate(),
              .tensors = algorithm.fused ? algorithm.fused->tensors : nullptr,
              .embeddings = module != nullptr ? optim::Embeddings(*module) : optim::Embeddings(),
              .states = algorithm.fused ? algorithm.fused->states : 0,
              .options = {typeid(*algorithm.defaults), algorithm.option_bytes},
          })) {}

ShardedOptimizer::~ShardedOptimizer() = default;

torch::Tensor ShardedOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  updates_->step();
  return loss;
}

NoSync ShardedOptimizer::no_sync() const {
  return NoSync(updates_->parameters());
}

const std::string& ShardedOptimizer::class_name() const {
  return updates_->class_name();
}

int64_t ShardedOptimizer::steps() {
  return updates_->steps();
}

zero::ShardedUpdates& updates_of(ShardedOptimizer& optimizer) {
  return *optimizer.updates_;
}

const zero::ShardedUpdates& updates_of(const ShardedOptimizer& optimizer) {
  return *optimizer.updates_;
}

void ShardedOptimizer::save(torch::serialize::OutputArchive&) const {
  ZP_THROW(
      "torch::save of a sharded optimizer: each rank holds a part of the state, and one archive "
      "would "
      "gather all of it; use zeropage::save_state(directory, module, optimizer), where module is "
      "the DistributedDataParallel, or the plain module that the optimizer alone steps");
}

void ShardedOptimizer::load(torch::serialize::InputArchive&) {
  ZP_THROW(
      "torch::load into a sharded optimizer: its state is in no archive; use "
      "zeropage::load_state(directory, module, optimizer), where module is the "
      "DistributedDataParallel, or the plain module that the optimizer alone steps");
}

}  // namespace zeropage

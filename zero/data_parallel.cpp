#include "zero/data_parallel.h"

#include "memory/check.h"

namespace zeropage {
namespace {

ShardedParameters shard(const torch::nn::Module& module, const comm::World& world,
                        const Options& options) {
  validate(options);
  auto parameters = parameters_of(module);
  std::vector<std::string> lines = describe(options);
  for (const NamedParameter& parameter : parameters) lines.push_back(describe(parameter));
  for (const auto& buffer : module.named_buffers()) {
    lines.push_back(c10::str("buffer \"", buffer.key(), "\": ", buffer.value().scalar_type(), " ",
                             buffer.value().sizes()));
  }
  world.check_agreement("the wrapped model", lines);
  auto reduction = make_gradient_reduction(options.stage);
  auto pages = std::make_shared<ParameterPages>(
      world, std::move(parameters),
      ParameterPages::PageOptions{options.page_bytes, reduction->ownership()});
  pages->broadcast_from_rank_zero();
  auto reducer =
      std::make_shared<GradientReducer>(pages, std::move(reduction), ReduceWhen::kInBackward);
  return {std::move(pages), std::move(reducer)};
}

}  // namespace

DataParallelBase::DataParallelBase(std::shared_ptr<torch::nn::Module> module, comm::World world,
                                   const Options& options)
    : base_(std::move(module)),
      world_(std::move(world)),
      options_(options),
      buffers_(world_, base_->buffers()),
      sharded_(shard(*base_, world_, options)) {
  buffers_.broadcast_from_rank_zero();
}

void DataParallelBase::before_forward() {
  // In eval mode buffers do not change, and one rank may evaluate alone.
  if (options_.broadcast_buffers && base_->is_training()) buffers_.broadcast_from_rank_zero();
}

}  // namespace zeropage

#include "zero/distributed_data_parallel.h"

#include <utility>

#include "memory/check.h"
#include "zero/setup/wrapped_module.h"

namespace zeropage {
namespace {

Collect exchange_collect(GradientReducer& reducer, Collect collect) {
  BackwardPlan plan = reducer.plan();
  const Collect before = std::exchange(plan.collect, collect);
  reducer.set_plan(plan);
  return before;
}

}  // namespace

NoSync::NoSync(std::shared_ptr<GradientReducer> reducer)
    : reducer_(std::move(reducer)), before_(exchange_collect(*reducer_, Collect::kLocally)) {}

NoSync::~NoSync() {
  exchange_collect(*reducer_, before_);
}

DistributedDataParallelBase::DistributedDataParallelBase(
    const std::shared_ptr<torch::nn::Module>& module, comm::World world, const Options& options,
    const memory::ConstructionTape* tape)
    : base_(module),
      wrapped_(std::make_shared<WrappedModule>(module, std::move(world), options, tape)) {}

const comm::World& DistributedDataParallelBase::world() const {
  return wrapped_->world();
}

const ShardedParameters& sharded_parameters_of(const DistributedDataParallelBase& model) {
  return model.wrapped_->sharded();
}

void DistributedDataParallelBase::before_forward() {
  wrapped_->before_forward();
}

memory::Kind DistributedDataParallelBase::kind_of_forward() {
  using memory::Kind;
  return memory::current_kind() == Kind::kRecompute ? Kind::kRecompute : Kind::kActivation;
}

NoSync DistributedDataParallelBase::no_sync() {
  ZP_CHECK(!wrapped_->options().world_invariant,
           "no_sync(): adds up this rank's micro-batches before the ranks', but "
           "options.world_invariant adds up the ranks' first, for bits that do not depend on the "
           "split; run backward() without it");
  return NoSync(wrapped_->sharded().reducer);
}

at::Tensor DistributedDataParallelBase::cast_input(const at::Tensor& tensor) const {
  const auto& dtype = wrapped_->options().compute_dtype;
  return dtype && tensor.defined() && tensor.is_floating_point() ? tensor.to(*dtype) : tensor;
}

memory::PagingStatistics DistributedDataParallelBase::paging() const {
  const auto& pager = wrapped_->sharded().paging->pager();
  return pager ? pager->statistics() : memory::PagingStatistics();
}

}  // namespace zeropage

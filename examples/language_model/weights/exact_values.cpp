#include "language_model/weights/exact_values.h"

#include <zeropage/owned_shards.h>

namespace language_model {
namespace {

// Experts that are spread over ranks: each element is on one rank, or all of a rank's experts on each that has the same ones.
torch::Tensor whole_experts(const zeropage::OwnedShard& shard, std::vector<int64_t> sizes,
                            const zeropage::comm::World& world,
                            const zeropage::comm::World& experts) {
  const int64_t slice = c10::multiply_integers(sizes), own = shard.range.numel();
  sizes[0] *= experts.size();
  const double owned = world.sum(static_cast<double>(own));
  const bool is_once = owned == static_cast<double>(slice * experts.size());
  TORCH_CHECK(is_once || own == slice, shard.name, ": this rank has ", own, " of ", slice,
              " elements, and other ranks have some of them too");
  torch::Tensor whole = torch::zeros(
      {slice * experts.size()}, shard.exact.options().device(world.device()).requires_grad(false));
  // The axis of experts is the innermost, so the first ranks have all of them once.
  if (is_once || world.rank() < experts.size()) {
    whole.narrow(0, experts.rank() * slice + shard.range.begin, own).copy_(shard.exact);
  }
  return world.sum(whole).view(sizes);
}

// Each element is on one rank, or all of them on each.
torch::Tensor whole_values(const zeropage::OwnedShard& shard, at::IntArrayRef sizes,
                           const zeropage::comm::World& world) {
  const int64_t numel = c10::multiply_integers(sizes), own = shard.range.numel();
  const bool is_shared = world.sum(static_cast<double>(own)) == static_cast<double>(numel);
  TORCH_CHECK(is_shared || own == numel, shard.name, ": this rank has ", own, " of ", numel,
              " elements, and other ranks have some of them too");
  torch::Tensor whole =
      torch::zeros({numel}, shard.exact.options().device(world.device()).requires_grad(false));
  whole.narrow(0, shard.range.begin, own).copy_(shard.exact);
  return (is_shared ? world.sum(whole) : whole).view(sizes);
}

}  // namespace

void visit_exact_values(
    const WrappedModel& model, const std::function<bool(const std::string& name)>& wanted,
    const std::function<void(const std::string& name, const torch::Tensor& values)>& visit) {
  const auto parameters = model.named_parameters();
  zeropage::visit_owned_shards(model, [&](const zeropage::OwnedShard& shard) {
    if (!wanted(shard.name)) return;
    const at::IntArrayRef sizes = parameters[shard.name].sizes();
    const zeropage::comm::World* const experts = model->expert_ranks();
    visit(shard.name, shard.is_slice && experts != nullptr
                          ? whole_experts(shard, sizes.vec(), model.world(), *experts)
                          : whole_values(shard, sizes, model.world()));
  });
}

}  // namespace language_model

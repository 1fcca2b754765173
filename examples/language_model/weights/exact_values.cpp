#include "language_model/weights/exact_values.h"

#include <zeropage/owned_shards.h>

namespace language_model {
namespace {

// Each element is on one rank, or all of them on each.
torch::Tensor whole_of(const zeropage::OwnedShard& shard, at::IntArrayRef sizes,
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
    visit(shard.name, whole_of(shard, parameters[shard.name].sizes(), model.world()));
  });
}

}  // namespace language_model

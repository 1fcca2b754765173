#include "zero/update/stochastic_update.h"

#include <utility>

#include "memory/storage.h"
#include "optim/stochastic_rounding.h"

namespace zeropage::zero {
namespace {

// [numel of like] fp32 on its device.
at::Tensor wide_without_memory(const at::Tensor& like) {
  const auto bytes = like.numel() * static_cast<int64_t>(sizeof(float));
  return memory::tensor_in(memory::storage_without_memory(bytes, like.device()), like,
                           /*offset=*/0, at::kFloat);
}

}  // namespace

StochasticUpdate::StochasticUpdate(const OwnedPart& part, uint64_t seed,
                                   const MakePageUpdate& make_update)
    : values_(part.values),
      seed_(seed),
      wide_(wide_without_memory(part.values)),
      update_(make_update({.values = wide_, .rounding_seed = part.rounding_seed})) {}

void StochasticUpdate::add_groups(std::vector<OwnedGroup> groups) {
  for (const OwnedGroup& group : groups) {
    shards_.insert(shards_.end(), group.shards.begin(), group.shards.end());
  }
  update_->add_groups(std::move(groups));
}

void StochasticUpdate::set_options(size_t group, const torch::optim::OptimizerOptions& options) {
  update_->set_options(group, options);
}

void StochasticUpdate::step(const at::Tensor& gradient, const HasGradient& has_gradient,
                            const optim::GradientFactors& factors, const Directions& directions) {
  c10::StorageImpl& storage = *wide_.storage().unsafeGetStorageImpl();
  memory::give_memory(storage, values_.to(at::kFloat));
  update_->step(gradient, has_gradient, factors, directions);
  for (const ParameterShard& shard : shards_) {
    if (shard.range.empty() || !has_gradient(shard.parameter)) continue;
    const auto of_shard = [&](const at::Tensor& flat) {
      return flat.narrow(0, shard.range.begin, shard.range.numel());
    };
    optim::round_stochastically(of_shard(wide_), of_shard(values_),
                                {.seed = seed_,
                                 .step = steps_,
                                 .tensor = shard.parameter,
                                 .first_element = shard.first_element});
  }
  ++steps_;
  memory::drop_memory(storage);
}

void StochasticUpdate::make_directions(const at::Tensor& gradient, const HasGradient& has_gradient,
                                       const optim::GradientFactors& factors,
                                       const at::Tensor& directions,
                                       const std::function<void()>& on_values) {
  c10::StorageImpl& storage = *wide_.storage().unsafeGetStorageImpl();
  memory::give_memory(storage, values_.to(at::kFloat));
  update_->make_directions(gradient, has_gradient, factors, directions, on_values);
  memory::drop_memory(storage);
}

}  // namespace zeropage::zero

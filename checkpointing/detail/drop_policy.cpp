#include "checkpointing/detail/drop_policy.h"

#include <algorithm>

namespace zeropage::checkpointing::detail {
namespace {

// What a forward that is not planned leaves free of its budget: so many of its largest values, but
// at least a quarter, and at most a third, for what is evicted comes back in chains.
constexpr int64_t kReservedValues = 8;

// Whether a replay that finds all saved values at hand repeats a product, by what is saved by now: a function
// of the user's saves its inputs after it has run.
bool takes_flops(Value& value) {
  if (value.chain_flops == 0) return false;
  if (!value.producer || value.producer->flops > 0) return true;
  bool takes = false;
  value.producer->for_each_input(
      [&](const auto& input) { takes = takes || (!input->saved && takes_flops(*input)); });
  if (!takes) value.chain_flops = 0;
  return takes;
}

}  // namespace

bool SelectiveDrops::drops(Value& value) const {
  return !takes_flops(value);
}

void CheapestDrops::keep(const std::shared_ptr<Value>& value, const ValueTable& values) {
  if (may_drop(*value)) {
    kept_.push_back(value);
  } else {
    DropPolicy::keep(value, values);
  }
  // Nobody knows yet what backward holds besides: gradients of activations, a replay, a head.
  const int64_t reserved =
      std::clamp(kReservedValues * values.largest_bytes(), limit_bytes_ / 4, limit_bytes_ / 3);
  while (values.kept_bytes().all > limit_bytes_ - reserved) {
    const auto victim = cheapest();
    if (!victim) return;
    victim->memory.let_go();
    victim->version = Version();
  }
}

// The value that is kept and takes the fewest operations a byte.
std::shared_ptr<Value> CheapestDrops::cheapest() const {
  std::shared_ptr<Value> cheapest;
  double least = 0;
  for (const auto& weak : kept_) {
    auto value = weak.lock();
    if (!value || !value->memory.is_kept()) continue;
    const double flops_per_byte = value->chain_flops / static_cast<double>(value->bytes);
    if (cheapest && flops_per_byte >= least) continue;
    cheapest = std::move(value);
    least = flops_per_byte;
  }
  return cheapest;
}

void CheapestDrops::end_forward(size_t /*operators*/) {
  for (const auto& weak : kept_) {
    const auto value = weak.lock();
    if (value && value->memory.is_kept()) value->producer.reset();
  }
  kept_.clear();
}

void PlannedDrops::see(const Operation& operation) {
  if (departed_) return;
  const auto& planned = plan_->signatures;
  departed_ = operation.index >= planned.size() || planned[operation.index] != operation.signature;
}

bool PlannedDrops::drops(Value& value) const {
  const auto& dropped = plan_->plan.dropped;
  return !departed_ && value.index < dropped.size() && dropped[value.index];
}

void PlannedDrops::keep(const std::shared_ptr<Value>& value, const ValueTable& values) {
  if (departed_) {
    unplanned_.keep(value, values);
  } else {
    DropPolicy::keep(value, values);
  }
}

void PlannedDrops::end_forward(size_t operators) {
  unplanned_.end_forward(operators);
  if (operators != plan_->signatures.size()) departed_ = true;
}

}  // namespace zeropage::checkpointing::detail

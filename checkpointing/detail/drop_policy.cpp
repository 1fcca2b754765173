#include "checkpointing/detail/drop_policy.h"

#include <algorithm>

#include "operators/dispatch_keys.h"
#include "operators/operator_schema.h"
#include "operators/tensor_mark.h"
#include "zeropage/check.h"

namespace zeropage::checkpointing::detail {
namespace {

// What a forward that is not planned leaves free of its budget: so many of its largest values, but
// at least a quarter, and at most a third, for what is evicted comes back in chains.
constexpr int64_t kReservedValues = 8;

// The operator of parallel/ by which a rank's experts get the rows of other ranks.
constexpr const char* kExchangeOfRows = "zeropage::experts_exchange_rows";

// Whether it takes a parameter that lies in a page. The slices that a layer has of a parameter carry the trap's key at every stage.
bool takes_a_page(at::ArrayRef<c10::IValue> arguments) {
  const auto is_marked = [](const at::Tensor& tensor) {
    return operators::mark_of(tensor) != nullptr ||
           (tensor.is_view() && operators::mark_of(at::Tensor(tensor._base())) != nullptr);
  };
  for (const c10::IValue& argument : arguments) {
    for (const at::Tensor& tensor : operators::tensors_in(argument)) {
      if (!tensor.defined() || !tensor.key_set().has(operators::kTrapKey)) continue;
      if (!is_marked(tensor)) return true;
    }
  }
  return false;
}

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

void CheapestDrops::see(const Operation& operation, at::ArrayRef<c10::IValue> arguments) {
  gathers_ = gathers_ || (operation.gathers && takes_a_page(arguments));
  exchanges_rows_ = exchanges_rows_ || operation.name == kExchangeOfRows;
  ZP_CHECK(
      !gathers_ || !exchanges_rows_,
      "recompute: expected no budget where tokens travel to experts on other ranks and "
      "parameters are sharded, got one: ranks get other numbers of tokens, so what fits on one "
      "does not on another, and all must gather the same pages; recompute selectively or by "
      "blocks, take checkpointed regions, or a stage below 3");
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

BlockDrops::BlockDrops(int64_t least_bytes, const std::vector<std::vector<at::Tensor>>& blocks)
    : DropPolicy(least_bytes), last_(static_cast<int>(blocks.size()) - 1) {
  for (size_t block = 0; block < blocks.size(); ++block) {
    for (const at::Tensor& parameter : blocks[block]) {
      block_of_storage_.emplace(parameter.storage().unsafeGetStorageImpl(),
                                static_cast<int>(block));
    }
  }
}

void BlockDrops::see_arguments(at::ArrayRef<c10::IValue> arguments) {
  for (const c10::IValue& argument : arguments) {
    for (const at::Tensor& tensor : operators::tensors_in(argument)) {
      if (!tensor.defined() || !tensor.has_storage()) continue;
      const auto found = block_of_storage_.find(tensor.storage().unsafeGetStorageImpl());
      if (found != block_of_storage_.end()) {
        now_ = found->second;
        return;
      }
      // A parameter of no block, as of a norm behind the blocks or a head.
      if (tensor.is_leaf() && tensor.requires_grad()) now_ = kNone;
    }
  }
}

void BlockDrops::see(const Operation& operation, at::ArrayRef<c10::IValue> arguments) {
  see_arguments(arguments);
  block_of_operation_.resize(operation.index, kNone);
  block_of_operation_.push_back(now_);
}

int BlockDrops::block_of(const Value& value) const {
  return value.producer ? block_of_operation_[value.producer->index] : kNone;
}

bool BlockDrops::drops(Value& value) const {
  const int block = block_of(value);
  return block != kNone && block != last_ && block == now_;
}

bool BlockDrops::keeps_after_all(const Value& value) const {
  return value.saved && value.source == Value::Source::kOperator && !value.memory.is_kept() &&
         block_of(value) != now_;
}

void PlannedDrops::see(const Operation& operation, at::ArrayRef<c10::IValue> arguments) {
  unplanned_.see(operation, arguments);
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

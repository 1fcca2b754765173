#include "checkpointing/detail/value_table.h"

#include <algorithm>
#include <utility>

namespace zeropage::checkpointing::detail {

std::shared_ptr<Value> ValueTable::find(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return nullptr;
  const auto found = values_.find(tensor.storage().unsafeGetStorageImpl());
  return found == values_.end() ? nullptr : found->second;
}

std::shared_ptr<Value> ValueTable::add(const at::Tensor& tensor, Value::Source source,
                                       std::shared_ptr<Operation> producer) {
  if (values_.size() >= forget_at_) forget_dead_storages();
  auto value = std::make_shared<Value>(tensor.storage(), source, kept_);
  value->index = next_++;
  largest_bytes_ = std::max(largest_bytes_, value->bytes);
  if (source != Value::Source::kOperator) value->version = Version(tensor);
  if (source == Value::Source::kLeaf) value->memory.keep_here(tensor.storage());
  if (producer) {
    value->chain_flops = producer->flops;
    producer->for_each_input([&](const auto& input) {
      if (!input->saved) value->chain_flops += input->chain_flops;
      if (!input->memory.is_kept() && input->chain_gathers) value->chain_gathers = true;
    });
    if (producer->gathers) value->chain_gathers = true;
    if (!producer->replayable) value->chain_gathers = false;
  }
  value->producer = std::move(producer);
  values_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(), value);
  return value;
}

void ValueTable::remove(const at::Tensor& tensor) {
  values_.erase(tensor.storage().unsafeGetStorageImpl());
}

void ValueTable::forget_dead_storages() {
  std::erase_if(values_, [](const auto& entry) { return entry.second->identity.expired(); });
  forget_at_ = std::max<size_t>(256, 2 * values_.size());
}

}  // namespace zeropage::checkpointing::detail

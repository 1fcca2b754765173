#include "checkpointing/detail/forward_log.h"

#include <algorithm>
#include <functional>
#include <string>

#include <ATen/core/grad_mode.h>
#include <c10/util/hash.h>

#include "operators/dispatch_keys.h"
#include "operators/operator_schema.h"
#include "operators/seeded_draws.h"

namespace zeropage::checkpointing::detail {
namespace {

using operators::tensors_in;

size_t signature_of(const c10::OperatorHandle& handle, at::ArrayRef<c10::IValue> arguments) {
  size_t hash = std::hash<std::string>()(handle.operator_name().name);
  for (const c10::IValue& argument : arguments) {
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    for (const int64_t size : argument.toTensor().sizes()) {
      hash = c10::hash_combine(hash, static_cast<size_t>(size));
    }
    hash = c10::hash_combine(hash, 0x5bd1e995);
  }
  return hash;
}

bool contains(const std::vector<size_t>& indices, size_t index) {
  return std::find(indices.begin(), indices.end(), index) != indices.end();
}

// It gives a tensor other memory, and a repetition would do so to a copy.
bool changes_storage(const OperatorFacts& facts) {
  return facts.name == "aten::set_" || facts.name.starts_with("aten::resize");
}

// Running statistics: the results do not depend on them, so a repetition gets any.
Operation::Tensor as_scratch(const Operation::Tensor& recorded, const c10::IValue& given) {
  Operation::Tensor scratch;
  if (given.isTensor() && given.toTensor().defined()) scratch.as_it_is = given.toTensor().detach();
  scratch.written = recorded.value || recorded.as_it_is.defined();
  return scratch;
}

}  // namespace

std::shared_ptr<Operation> ForwardLog::begin_operator(const c10::OperatorHandle& handle,
                                                      const OperatorFacts& facts,
                                                      at::ArrayRef<c10::IValue> arguments) {
  auto operation =
      std::make_shared<Operation>(Operation{.index = operators_,
                                            .signature = signature_of(handle, arguments),
                                            .handle = handle,
                                            .name = facts.name,
                                            .modes = modes_now(),
                                            .flops = flops_of(facts, arguments)});
  for (size_t index = 0; index < arguments.size(); ++index) {
    const c10::IValue& given = arguments[index];
    const bool is_written = contains(facts.written, index);
    auto& argument = operation->arguments.emplace_back(given, [&](const at::Tensor& tensor) {
      Operation::Tensor recorded = record_tensor(tensor, *operation);
      recorded.written = is_written;
      return recorded;
    });
    // What an object does, such as talk to other ranks, need not happen on them again.
    if (given.isCustomClass()) operation->replayable = false;
    if (contains(facts.statistics, index)) {
      for (auto& tensor : argument.tensors()) tensor = as_scratch(tensor, given);
    }
  }
  make_room_for_writes(facts, arguments, operation);
  if (operators::draws(handle)) note_draw(handle, arguments, *operation);
  if (meter_ != nullptr) meter_->add_operator(*operation);
  ++operators_;
  current_ = operation;
  return operation;
}

void ForwardLog::note_draw(const c10::OperatorHandle& handle, at::ArrayRef<c10::IValue> arguments,
                           Operation& operation) {
  const c10::Device place = place_of_arguments(arguments);
  if (!operators::draws_have_seeds()) {
    operation.random = RandomState::take(place);
  } else if (operators::draws_by_default(handle, arguments)) {
    operation.random = RandomState::take_of_accelerator(place);
    operation.seed = operators::next_seed(handle);
    return;
  } else {
    operation.random.emplace();
  }
  for (const c10::IValue& given : arguments) {
    if (given.isGenerator()) operation.random->add(given.toGenerator());
  }
}

Operation::Tensor ForwardLog::record_tensor(const at::Tensor& tensor, Operation& operation) {
  Operation::Tensor recorded;
  if (!tensor.defined()) return recorded;
  recorded.requires_grad = tensor.requires_grad() && at::GradMode::is_enabled();
  if (tensor.key_set().has(operators::kTrapKey)) operation.gathers = true;
  if (!Geometry::describes(tensor)) {
    recorded.as_it_is = tensor.detach();
    recorded.version = Version(tensor);
    return recorded;
  }
  recorded.value = values_.find(tensor);
  if (!recorded.value) recorded.value = add(tensor, Value::Source::kLeaf, nullptr);
  recorded.geometry.emplace(tensor);
  Value& value = *recorded.value;
  if (value.memory.is_kept() || value.can_be_made_again()) return recorded;
  if (value.bytes < least_bytes_) {
    // A few statistics must not keep a large result from being made again.
    value.memory.keep_here(tensor.storage());
    value.version = Version(tensor);
  } else {
    operation.lacks_inputs = true;
  }
  return recorded;
}

// What an operator writes in place becomes another value. Where the operator can be repeated, the
// value before the write can be had again, for it is a result itself; else what it overwrites is
// copied if the repetition of another operator may read it.
void ForwardLog::make_room_for_writes(const OperatorFacts& facts,
                                      at::ArrayRef<c10::IValue> arguments,
                                      const std::shared_ptr<Operation>& operation) {
  if (changes_storage(facts)) operation->replayable = false;
  std::vector<at::Tensor> in_place;
  for (const size_t index : facts.written) {
    for (const at::Tensor& tensor : tensors_in(arguments[index])) {
      if (Geometry::describes(tensor)) in_place.push_back(tensor);
    }
  }
  // Its inputs may be saved yet, but not what it writes to.
  if (!in_place.empty() && operation->lacks_inputs) operation->replayable = false;
  for (const at::Tensor& tensor : in_place) {
    const auto value = values_.find(tensor);
    const bool remade =
        value && value->source == Value::Source::kOperator && !value->memory.is_kept();
    if (!remade) operation->replayable = false;
  }
  for (const at::Tensor& tensor : written_tensors(facts, arguments)) {
    const auto value = values_.find(tensor);
    if (!value) continue;
    // Besides this variable, the map and this operator.
    if (value->memory.is_kept() && value.use_count() > 3) {
      value->memory.keep_copy_of(tensor.storage());
      value->version = Version();
    }
    if (meter_ != nullptr) meter_->note_overwritten(*value);
    values_.remove(tensor);
  }
  for (const at::Tensor& tensor : in_place) {
    if (operation->replayable) {
      add(tensor, Value::Source::kOperator, operation);
    } else {
      written_.emplace_back(add(tensor, Value::Source::kUnknown, nullptr), tensor);
    }
  }
}

void ForwardLog::note_results(const std::shared_ptr<Operation>& operation,
                              at::ArrayRef<c10::IValue> results) {
  flops_ += operation->flops;
  for (const auto& [value, tensor] : written_) value->version = Version(tensor);
  written_.clear();
  for (const c10::IValue& result : results) {
    for (const at::Tensor& tensor : tensors_in(result)) {
      auto& noted = operation->results.emplace_back();
      if (!Geometry::describes(tensor)) continue;
      auto value = values_.find(tensor);
      if (!value) value = add(tensor, Value::Source::kOperator, operation);
      // A result may be an argument, or have been saved within the operator.
      if (value->producer == operation) noted = value;
    }
  }
}

const std::shared_ptr<const ThreadModes>& ForwardLog::modes_now() {
  if (!modes_ || !(*modes_ == ThreadModes::take())) {
    modes_ = std::make_shared<const ThreadModes>(ThreadModes::take());
  }
  return modes_;
}

std::shared_ptr<Value> ForwardLog::add(const at::Tensor& tensor, Value::Source source,
                                       std::shared_ptr<Operation> producer) {
  auto value = values_.add(tensor, source, std::move(producer));
  if (meter_ != nullptr) meter_->add_value(*value);
  return value;
}

std::shared_ptr<Value> ForwardLog::note_saved(const at::Tensor& tensor) {
  std::weak_ptr<Value>* noted = nullptr;
  if (current_) noted = &current_->saved.emplace_back();
  if (!Geometry::describes(tensor)) return nullptr;
  auto value = values_.find(tensor);
  if (!value && current_) value = add(tensor, Value::Source::kOperator, current_);
  if (value && current_ && value->producer == current_) *noted = value;
  if (!value) value = add(tensor, Value::Source::kUnknown, nullptr);
  return value;
}

void ForwardLog::end_forward() {
  values_.clear();
  written_.clear();
  modes_.reset();
}

}  // namespace zeropage::checkpointing::detail

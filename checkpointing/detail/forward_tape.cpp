#include "checkpointing/detail/forward_tape.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/hash.h>
#include <torch/csrc/autograd/engine.h>

#include "checkpointing/detail/storage_bytes.h"
#include "checkpointing/detail/unchanged.h"
#include "device/stream.h"
#include "operators/operator_schema.h"
#include "operators/tensor_mark.h"

namespace zeropage::checkpointing::detail {
namespace {

using memory::tensors_in;
using Clock = std::chrono::steady_clock;

// What a forward that is not planned leaves free of its budget: so many of its largest values, but
// at least a quarter, and at most a third, for what is evicted comes back in chains.
constexpr int64_t kReservedValues = 8;

bool in_backward() {
  return torch::autograd::get_current_graph_task_id() >= 0;
}

c10::Device place_of_arguments(at::ArrayRef<c10::IValue> arguments) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined() && !argument.toTensor().is_cpu()) {
      return argument.toTensor().device();
    }
  }
  return c10::kCPU;
}

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

class Hooks final : public SavedTensorHooks {
 public:
  explicit Hooks(std::shared_ptr<ForwardTape> tape) : tape_(std::move(tape)) {}
  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    return tape_->pack(tensor);
  }

 private:
  const std::shared_ptr<ForwardTape> tape_;
};

}  // namespace

class ForwardTape::Packed final : public PackedTensor {
 public:
  Packed(std::shared_ptr<ForwardTape> tape, std::shared_ptr<Value> value, const at::Tensor& tensor)
      : tape_(std::move(tape)),
        value_(std::move(value)),
        geometry_(tensor),
        unchanged_(tensor, "") {}
  ~Packed() override { tape_->release(*value_); }
  at::Tensor unpack() override {
    unchanged_.check();
    return tape_->unpack(value_, geometry_);
  }

 private:
  const std::shared_ptr<ForwardTape> tape_;
  const std::shared_ptr<Value> value_;
  const Geometry geometry_;
  const Unchanged unchanged_;
};

ForwardTape::ForwardTape(TapeOptions options)
    : options_(std::move(options)),
      ledger_(memory::Ledger::current()),
      account_(RecomputeAccount::of_this_thread()) {
  if (options_.measures) ledger_->take_recent_activation_peak(options_.device);
}

void ForwardTape::run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                      torch::jit::Stack& stack) {
  const OperatorFacts& facts = facts_of(handle);
  if (in_backward() || facts.only_views) {
    memory::run_operator(handle, keys, stack);
    return;
  }
  const auto arguments = torch::jit::last(stack, handle.schema().arguments().size());
  if (facts.is_composite || memory::is_replaced(handle, arguments)) {
    memory::run_operator_from_outside(handle, keys, stack);
    return;
  }
  const auto operation = record(handle, facts, arguments);
  const c10::Device place = place_of_arguments(arguments);
  {
    struct Current {
      explicit Current(ForwardTape& tape, std::shared_ptr<Operation> operation) : tape(tape) {
        tape.current_ = std::move(operation);
      }
      ~Current() { tape.current_.reset(); }
      ForwardTape& tape;
    };
    const Current current(*this, operation);
    const auto start = Clock::now();
    memory::run_operator(handle, keys, stack);
    if (options_.measures) {
      if (memory::has_streams(place.type())) memory::Stream::current(place).record().synchronize();
      operation->seconds = std::chrono::duration<double>(Clock::now() - start).count();
    }
  }
  flops_ += operation->flops;
  const std::lock_guard lock(mutex_);
  note_results(operation, torch::jit::last(stack, handle.schema().returns().size()));
  if (options_.measures) step_.operators[operation->index].seconds = operation->seconds;
}

std::shared_ptr<Operation> ForwardTape::record(const c10::OperatorHandle& handle,
                                               const OperatorFacts& facts,
                                               at::ArrayRef<c10::IValue> arguments) {
  auto operation =
      std::make_shared<Operation>(Operation{.index = signatures_.size(),
                                            .signature = signature_of(handle, arguments),
                                            .handle = handle,
                                            .name = facts.name,
                                            .modes = modes_now(),
                                            .flops = flops_of(facts, arguments)});
  const std::lock_guard lock(mutex_);
  for (size_t index = 0; index < arguments.size(); ++index) {
    const c10::IValue& given = arguments[index];
    const bool is_written = contains(facts.written, index);
    auto& argument = operation->arguments.emplace_back(given, [&](const at::Tensor& tensor) {
      Operation::Tensor recorded = record_tensor(tensor, *operation);
      recorded.written = is_written;
      return recorded;
    });
    // A generator's state is nobody's here to put back. What an object does, such as talk to other
    // ranks, need not happen on them again.
    if (given.isGenerator() || given.isCustomClass()) operation->replayable = false;
    if (contains(facts.statistics, index)) {
      for (auto& tensor : argument.tensors()) tensor = as_scratch(tensor, given);
    }
  }
  make_room_for_writes(facts, arguments, operation);
  if (memory::draws(handle)) operation->random = RandomState::take(place_of_arguments(arguments));
  follow_plan(*operation);
  signatures_.push_back(operation->signature);
  if (options_.measures) {
    names_.push_back(facts.name);
    RecordedOperator recorded{.signature = std::to_string(operation->signature),
                              .replayable = operation->replayable};
    operation->for_each_input([&](const auto& value) { recorded.inputs.push_back(value->index); });
    step_.operators.push_back(std::move(recorded));
  }
  return operation;
}

Operation::Tensor ForwardTape::record_tensor(const at::Tensor& tensor, Operation& operation) {
  Operation::Tensor recorded;
  if (!tensor.defined()) return recorded;
  recorded.requires_grad = tensor.requires_grad() && at::GradMode::is_enabled();
  if (!Geometry::describes(tensor)) {
    recorded.as_it_is = tensor.detach();
    recorded.version = Version(tensor);
    return recorded;
  }
  recorded.value = find(tensor);
  if (!recorded.value) recorded.value = add(tensor, Value::Source::kLeaf, nullptr);
  recorded.geometry.emplace(tensor);
  Value& value = *recorded.value;
  const bool can_be_had = value.has_memory() || (value.source == Value::Source::kOperator &&
                                                 value.producer && value.producer->replayable);
  if (can_be_had) return recorded;
  if (value.bytes < options_.least_bytes) {
    // A few statistics must not keep a large result from being made again.
    value.hold(tensor.storage());
    value.version = Version(tensor);
  } else {
    operation.replayable = false;
  }
  return recorded;
}

// What an operator writes in place becomes another value. Where the operator can be repeated, the
// value before the write can be had again, for it is a result itself; else what it overwrites is
// copied if the repetition of another operator may read it.
void ForwardTape::make_room_for_writes(const OperatorFacts& facts,
                                       at::ArrayRef<c10::IValue> arguments,
                                       const std::shared_ptr<Operation>& operation) {
  if (changes_storage(facts)) operation->replayable = false;
  std::vector<at::Tensor> in_place;
  for (const size_t index : facts.written) {
    for (const at::Tensor& tensor : tensors_in(arguments[index])) {
      if (Geometry::describes(tensor)) in_place.push_back(tensor);
    }
  }
  for (const at::Tensor& tensor : in_place) {
    const auto value = find(tensor);
    const bool remade = value && value->source == Value::Source::kOperator && !value->has_memory();
    if (!remade) operation->replayable = false;
  }
  for (const at::Tensor& tensor : written_tensors(facts, arguments)) {
    const auto value = find(tensor);
    if (!value) continue;
    // Besides this variable, the map and this operator.
    if (value->has_memory() && value.use_count() > 3) {
      value->hold(copy_of(tensor.storage()));
      value->version = Version();
    }
    // In a replay both lie in one memory.
    if (options_.measures && !value->saved) step_.values[value->index].bytes = 0;
    values_.erase(tensor.storage().unsafeGetStorageImpl());
  }
  for (const at::Tensor& tensor : in_place) {
    if (operation->replayable) {
      add(tensor, Value::Source::kOperator, operation);
    } else {
      written_.emplace_back(add(tensor, Value::Source::kUnknown, nullptr), tensor);
    }
  }
}

void ForwardTape::note_results(const std::shared_ptr<Operation>& operation,
                               at::ArrayRef<c10::IValue> results) {
  for (const auto& [value, tensor] : written_) value->version = Version(tensor);
  written_.clear();
  for (const c10::IValue& result : results) {
    for (const at::Tensor& tensor : tensors_in(result)) {
      auto& noted = operation->results.emplace_back();
      if (!Geometry::describes(tensor)) continue;
      auto value = find(tensor);
      if (!value) value = add(tensor, Value::Source::kOperator, operation);
      // A result may be an argument, or have been saved within the operator.
      if (value->producer == operation) noted = value;
    }
  }
}

void ForwardTape::follow_plan(const Operation& operation) {
  if (options_.rule != TapeOptions::Rule::kPlanned || departed_) return;
  const auto& planned = options_.plan->signatures;
  departed_ = operation.index >= planned.size() || planned[operation.index] != operation.signature;
}

const std::shared_ptr<const ThreadModes>& ForwardTape::modes_now() {
  if (!modes_ || !(*modes_ == ThreadModes::take())) {
    modes_ = std::make_shared<const ThreadModes>(ThreadModes::take());
  }
  return modes_;
}

std::shared_ptr<Value> ForwardTape::find(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  const auto found = values_.find(tensor.storage().unsafeGetStorageImpl());
  return found == values_.end() ? nullptr : found->second;
}

std::shared_ptr<Value> ForwardTape::add(const at::Tensor& tensor, Value::Source source,
                                        std::shared_ptr<Operation> producer) {
  if (values_.size() >= forget_at_) forget_dead_storages();
  auto value = std::make_shared<Value>(tensor.storage(), held_bytes_);
  value->index = next_value_++;
  value->source = source;
  largest_bytes_ = std::max(largest_bytes_, value->bytes);
  if (source != Value::Source::kOperator) value->version = Version(tensor);
  if (source == Value::Source::kLeaf) value->hold(tensor.storage());
  if (producer) {
    value->chain_flops = producer->flops;
    producer->for_each_input([&](const auto& input) {
      if (!input->saved) value->chain_flops += input->chain_flops;
    });
  }
  value->producer = std::move(producer);
  if (options_.measures) {
    step_.values.push_back({.bytes = value->bytes, .producer = kLeaf});
    if (value->producer) step_.values.back().producer = value->producer->index;
    needed_.push_back(false);
  }
  values_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(), value);
  return value;
}

void ForwardTape::forget_dead_storages() {
  std::erase_if(values_, [](const auto& entry) { return entry.second->identity.expired(); });
  forget_at_ = std::max<size_t>(256, 2 * values_.size());
}

std::shared_ptr<SavedTensorHooks> ForwardTape::hooks() {
  return std::make_shared<Hooks>(shared_from_this());
}

std::unique_ptr<PackedTensor> ForwardTape::pack(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  std::weak_ptr<Value>* noted = nullptr;
  if (current_) noted = &current_->saved.emplace_back();
  if (!Geometry::describes(tensor) || in_backward()) return keep(tensor);
  auto value = find(tensor);
  if (!value && current_) value = add(tensor, Value::Source::kOperator, current_);
  if (value && current_ && value->producer == current_) *noted = value;
  if (!value) value = add(tensor, Value::Source::kUnknown, nullptr);
  const bool first = !std::exchange(value->saved, true);
  ++value->packs;
  if (first && value->source != Value::Source::kLeaf) {
    tick(Event::kSave, *value);
    if (stays(*value)) {
      value->hold(tensor.storage());
      value->version = Version(tensor);
      const bool evicts = options_.rule == TapeOptions::Rule::kEvicting || departed_;
      if (evicts && value->producer && value->producer->replayable &&
          value->bytes >= options_.least_bytes) {
        evictable_.push_back(value);
      } else {
        value->producer.reset();
      }
      if (evicts) evict_down_to_limit();
    } else {
      value->dropped = true;
    }
  }
  return std::make_unique<Packed>(shared_from_this(), value, tensor);
}

// Whether a replay that finds all saved values at hand repeats a product, by what is saved by now: a function
// of the user's saves its inputs after it has run.
bool ForwardTape::takes_flops(Value& value) const {
  if (value.chain_flops == 0) return false;
  if (!value.producer || value.producer->flops > 0) return true;
  bool takes = false;
  value.producer->for_each_input(
      [&](const auto& input) { takes = takes || (!input->saved && takes_flops(*input)); });
  if (!takes) value.chain_flops = 0;
  return takes;
}

bool ForwardTape::stays(Value& value) const {
  if (value.bytes < options_.least_bytes || value.source != Value::Source::kOperator ||
      !value.producer || !value.producer->replayable) {
    return true;
  }
  switch (options_.rule) {
    case TapeOptions::Rule::kSelective:
      return takes_flops(value);
    case TapeOptions::Rule::kPlanned: {
      const auto& dropped = options_.plan->plan.dropped;
      return departed_ || value.index >= dropped.size() || !dropped[value.index];
    }
    case TapeOptions::Rule::kEvicting:
      return true;
  }
  return true;
}

void ForwardTape::evict_down_to_limit() {
  // Nobody knows yet what backward holds besides: gradients of activations, a replay, a head.
  const int64_t reserved = std::clamp(kReservedValues * largest_bytes_, options_.limit_bytes / 4,
                                      options_.limit_bytes / 3);
  const int64_t limit = options_.limit_bytes - reserved;
  while (*held_bytes_ > limit) {
    std::shared_ptr<Value> cheapest;
    double least = 0;
    for (const auto& weak : evictable_) {
      const auto value = weak.lock();
      if (!value || !value->has_memory()) continue;
      const double flops_per_byte = value->chain_flops / static_cast<double>(value->bytes);
      if (cheapest && flops_per_byte >= least) continue;
      cheapest = value;
      least = flops_per_byte;
    }
    if (!cheapest) return;
    cheapest->let_go();
    cheapest->version = Version();
    cheapest->dropped = true;
  }
}

void ForwardTape::end_forward() {
  const std::lock_guard lock(mutex_);
  values_.clear();
  written_.clear();
  modes_.reset();
  for (const auto& weak : evictable_) {
    const auto value = weak.lock();
    if (value && value->has_memory()) value->producer.reset();
  }
  evictable_.clear();
  if (options_.rule == TapeOptions::Rule::kPlanned &&
      signatures_.size() != options_.plan->signatures.size()) {
    departed_ = true;
  }
  account_->add_forward(flops_);
}

at::Tensor ForwardTape::unpack(const std::shared_ptr<Value>& value, const Geometry& geometry) {
  const std::lock_guard lock(mutex_);
  if (counts(*value) && options_.measures && !needed_[value->index]) {
    needed_[value->index] = true;
    tick(Event::kNeed, *value);
  }
  if (!value->has_memory()) {
    const bool for_good = in_backward() && !torch::autograd::get_current_graph_task_keep_graph();
    const int backward = torch::autograd::get_current_graph_task_id();
    if (in_backward() && !for_good && std::exchange(drops_again_after_, backward) != backward) {
      torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
        if (const auto tape = weak.lock()) tape->drop_again();
      });
    }
    const memory::LedgerScope ledger(ledger_);
    const memory::KindScope kind(memory::Kind::kRecompute);
    const auto start = Clock::now();
    const double flops = bring_back(value, for_good, [&](const std::shared_ptr<Value>& back) {
      if (!for_good) brought_back_.push_back(back);
    });
    account_->add_replay(flops, std::chrono::duration<double>(Clock::now() - start).count());
    if (options_.measures) ledger_->take_recent_activation_peak(options_.device);
  }
  return geometry.on(value->memory());
}

void ForwardTape::release(Value& value) {
  const std::lock_guard lock(mutex_);
  if (--value.packs == 0 && counts(value)) tick(Event::kRelease, value);
}

void ForwardTape::drop_again() {
  const std::lock_guard lock(mutex_);
  for (const auto& weak : brought_back_) {
    const auto value = weak.lock();
    if (!value || !value->has_memory() || value->packs == 0) continue;
    value->let_go();
  }
  brought_back_.clear();
}

void ForwardTape::tick(Event event, const Value& value) {
  if (!options_.measures) return;
  int64_t peak = ledger_->take_recent_activation_peak(options_.device);
  // It was made since the tick before, and counts as saved from there on.
  if (event == Event::kSave) peak -= value.bytes;
  step_.ticks.push_back({.event = event,
                         .value = value.index,
                         .other_bytes = std::max<int64_t>(0, peak - *held_bytes_)});
  if (event != Event::kSave) return;
  const bool candidate = value.bytes >= options_.least_bytes &&
                         value.source == Value::Source::kOperator && value.producer &&
                         value.producer->replayable;
  step_.values[value.index].retention = candidate ? Retention::kSaved : Retention::kHeld;
}

RecordedStep ForwardTape::recorded_step() const {
  const std::lock_guard lock(mutex_);
  return step_;
}

}  // namespace zeropage::checkpointing::detail

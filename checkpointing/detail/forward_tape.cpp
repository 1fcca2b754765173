#include "checkpointing/detail/forward_tape.h"

#include <chrono>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/graph_task.h>

#include "checkpointing/detail/saved_storage.h"
#include "checkpointing/detail/unchanged.h"
#include "device/stream.h"
#include "operators/operator_schema.h"
#include "operators/seeded_draws.h"
#include "operators/tensor_mark.h"

namespace zeropage::checkpointing::detail {
namespace {

bool in_backward() {
  return torch::autograd::get_current_graph_task_id() >= 0;
}

// Whether its uses count: a leaf is there anyway.
bool counts(const Value& value) {
  return value.saved && value.source != Value::Source::kLeaf;
}

class TapeHooks final : public SavedTensorHooks {
 public:
  TapeHooks(std::shared_ptr<ForwardTape> tape, std::shared_ptr<SavedTensorHooks> onward)
      : tape_(std::move(tape)), onward_(std::move(onward)) {}
  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    return tape_->pack(tensor, onward_);
  }
  std::shared_ptr<SavedTensorHooks> place_of_storages() override { return onward_; }
  std::shared_ptr<SavedTensorHooks> handing_on_to(
      std::shared_ptr<SavedTensorHooks> place) const override {
    return tape_->hooks(std::move(place));
  }

 private:
  const std::shared_ptr<ForwardTape> tape_;
  const std::shared_ptr<SavedTensorHooks> onward_;
};

}  // namespace

class ForwardTape::Packed final : public PackedTensor {
 public:
  Packed(std::shared_ptr<ForwardTape> tape, std::shared_ptr<Value> value, const at::Tensor& tensor)
      : tape_(std::move(tape)),
        value_(std::move(value)),
        geometry_(tensor),
        unchanged_(tensor, "") {
    ++value_->packs;
  }
  ~Packed() override { tape_->release(value_); }
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
    : decides_alone_(options.decides_alone),
      policy_(std::move(options.policy)),
      meter_(options.measured_device ? std::make_unique<StepMeter>(*options.measured_device)
                                     : nullptr),
      account_(std::move(options.account)),
      log_(policy_->least_bytes(), meter_.get()),
      replay_(account_) {}

void ForwardTape::run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                      torch::jit::Stack& stack) {
  const OperatorFacts& facts = facts_of(handle);
  if (in_backward() || facts.only_views) {
    operators::run_with_current_seeds(handle, keys, stack);
    return;
  }
  const auto arguments = torch::jit::last(stack, handle.schema().arguments().size());
  if (facts.is_composite || operators::is_replaced(handle, arguments)) {
    {
      const std::lock_guard lock(mutex_);
      policy_->see_arguments(arguments);
    }
    operators::run_operator_from_outside(handle, keys, stack);
    return;
  }
  const c10::Device place = place_of_arguments(arguments);
  std::shared_ptr<Operation> operation;
  {
    const std::lock_guard lock(mutex_);
    operation = log_.begin_operator(handle, facts, arguments);
    policy_->see(*operation, arguments);
    keep_after_all(*operation, arguments);
  }
  {
    const auto end = c10::make_scope_exit([this] {
      const std::lock_guard lock(mutex_);
      log_.end_operator();
    });
    const auto start = std::chrono::steady_clock::now();
    if (operation->seed) {
      operators::run_seeded(handle, keys, stack, *operation->seed);
    } else {
      operators::run_operator(handle, keys, stack);
    }
    if (meter_) {
      if (device::has_streams(place.type())) device::Stream::current(place).record().synchronize();
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      operation->seconds = seconds.count();
    }
  }
  const std::lock_guard lock(mutex_);
  log_.note_results(operation, torch::jit::last(stack, handle.schema().returns().size()));
  if (meter_) meter_->note_seconds(*operation);
}

void ForwardTape::keep_after_all(const Operation& operation, at::ArrayRef<c10::IValue> arguments) {
  for (size_t index = 0; index < arguments.size(); ++index) {
    for (const Operation::Tensor& recorded : operation.arguments[index].tensors()) {
      if (!recorded.value || !policy_->keeps_after_all(*recorded.value)) continue;
      const auto storage = recorded.value->identity.lock();
      for (const at::Tensor& tensor : operators::tensors_in(arguments[index])) {
        if (!tensor.defined() || !tensor.has_storage()) continue;
        if (tensor.storage().unsafeGetStorageImpl() != storage.get()) continue;
        recorded.value->memory.keep(tensor, onward_);
        recorded.value->version = Version(tensor);
        policy_->keep(recorded.value, log_.values());
        break;
      }
    }
  }
}

std::shared_ptr<SavedTensorHooks> ForwardTape::hooks(std::shared_ptr<SavedTensorHooks> onward) {
  return std::make_shared<TapeHooks>(shared_from_this(), std::move(onward));
}

std::unique_ptr<PackedTensor> ForwardTape::pack(const at::Tensor& tensor,
                                                const std::shared_ptr<SavedTensorHooks>& onward) {
  const std::lock_guard lock(mutex_);
  const auto value = in_backward() ? nullptr : log_.note_saved(tensor);
  if (!value) return pack_with(onward, tensor);
  onward_ = onward;
  const bool first = !std::exchange(value->saved, true);
  if (first && counts(*value)) {
    const bool may_drop = policy_->may_drop(*value);
    if (meter_) meter_->note_save(*value, log_.values().kept_bytes(), may_drop);
    if (!may_drop || !policy_->drops(*value)) {
      value->memory.keep(tensor, onward);
      value->version = Version(tensor);
      policy_->keep(value, log_.values());
    }
  } else if (first && onward && !is_of_parameter(tensor)) {
    // An input of the scope, or what a region within it has made.
    value->memory.keep(tensor, onward);
  }
  return std::make_unique<Packed>(shared_from_this(), value, tensor);
}

void ForwardTape::end_forward() {
  const std::lock_guard lock(mutex_);
  log_.end_forward();
  policy_->end_forward(log_.operators());
  account_.add_forward(log_.flops());
}

at::Tensor ForwardTape::unpack(const std::shared_ptr<Value>& value, const Geometry& geometry) {
  const std::lock_guard lock(mutex_);
  if (meter_ && counts(*value)) meter_->note_need(*value, log_.values().kept_bytes());
  if (!value->memory.is_kept()) {
    replay_.bring_back(value, [weak = weak_from_this()] {
      if (const auto tape = weak.lock()) tape->end_backward();
    });
    if (meter_) meter_->leave_out_what_was();
  }
  return geometry.on(value->memory.get());
}

void ForwardTape::release(const std::shared_ptr<Value>& value) {
  const std::lock_guard lock(mutex_);
  if (--value->packs > 0 || !counts(*value)) return;
  if (meter_) meter_->note_release(*value, log_.values().kept_bytes());
}

void ForwardTape::end_backward() {
  const std::lock_guard lock(mutex_);
  replay_.drop_again();
}

}  // namespace zeropage::checkpointing::detail

#include "checkpointing/detail/recorded_forward.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/variable.h>

#include "checkpointing/detail/storage_bytes.h"
#include "checkpointing/saved_tensors.h"
#include "memory/check.h"
#include "memory/libtorch_release.h"
#include "operators/dispatch_keys.h"
#include "operators/operator_interceptor.h"
#include "operators/operator_schema.h"

namespace zeropage::checkpointing::detail {
namespace {

// Memory of values that pass within one replay, and how many of its operators still read a value.
struct Passing {
  std::unordered_map<const Value*, c10::Storage> memory;
  std::unordered_map<const Value*, int> readers;

  bool last_reader_of(const Value& value) const {
    const auto found = readers.find(&value);
    return memory.contains(&value) && found != readers.end() && found->second == 1;
  }
};

c10::Storage memory_of(const Value& value, const Passing& passing) {
  if (value.has_memory()) return value.memory();
  const auto found = passing.memory.find(&value);
  TORCH_INTERNAL_ASSERT(found != passing.memory.end(), "a replay reads a value before it is there");
  return found->second;
}

void refuse_changed(bool unchanged, const Operation& operation) {
  ZP_CHECK(unchanged, "recompute of ", operation.name,
           ": a tensor that it reads was changed in place since the forward; change a clone, or "
           "run backward() before it changes");
}

at::Tensor input_of(const Operation::Tensor& input, const Operation& operation,
                    const Passing& passing) {
  at::Tensor tensor = input.as_it_is;
  if (!input.value) {
    if (!tensor.defined()) return tensor;
    // Statistics that a forward updates are none of its inputs.
    if (!input.written) refuse_changed(input.version.still_holds(), operation);
    const at::NoGradGuard no_grad;
    tensor = input.written ? tensor.clone() : tensor.detach();
  } else {
    refuse_changed(input.value->version.still_holds(), operation);
    c10::Storage storage = memory_of(*input.value, passing);
    if (input.written && !passing.last_reader_of(*input.value)) storage = copy_of(storage);
    tensor = input.geometry->on(storage);
  }
  if (!input.requires_grad) return tensor;
  if (input.written) {
    attach_to_nothing(tensor);
  } else {
    tensor.requires_grad_();
  }
  return tensor;
}

// Collects what autograd saves, in order, and keeps it until the operator has ended.
class Collector final : public SavedTensorHooks {
 public:
  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    storages.push_back(tensor.has_storage() ? tensor.storage() : c10::Storage());
    return keep(tensor);
  }
  std::vector<c10::Storage> storages;
};

// What a run of an operator gave, by position.
struct Given {
  std::vector<c10::Storage> results;
  std::vector<c10::Storage> saved;
};

void add_storages(const c10::IValue& value, std::vector<c10::Storage>& storages) {
  for (const at::Tensor& tensor : memory::tensors_in(value)) {
    storages.push_back(tensor.defined() && tensor.has_storage() ? tensor.storage()
                                                                : c10::Storage());
  }
}

Given run_again(const Operation& operation, const Passing& passing) {
  const memory::InterceptorScope unseen(nullptr);
  torch::jit::Stack stack;
  for (const auto& argument : operation.arguments) {
    stack.push_back(
        argument.with([&](const auto& input) { return input_of(input, operation, passing); }));
  }
  const ThreadModesScope modes(*operation.modes);
  std::optional<RandomStateScope> random;
  if (operation.random) random.emplace(*operation.random);
  const auto collector = std::make_shared<Collector>();
  const SavedTensorScope scope(collector);
  operation.handle.callBoxed(&stack);
  Given given;
  for (const c10::IValue& result : stack) add_storages(result, given.results);
  given.saved = std::move(collector->storages);
  return given;
}

// All operators that must run, in their order.
std::vector<std::shared_ptr<Operation>> needed_for(const std::shared_ptr<Value>& value) {
  std::vector<std::shared_ptr<Operation>> operations;
  std::vector<const Value*> open = {value.get()};
  std::unordered_map<const Operation*, bool> known;
  while (!open.empty()) {
    const Value* const next = open.back();
    open.pop_back();
    if (next->has_memory()) continue;
    TORCH_INTERNAL_ASSERT(next->producer && next->producer->replayable,
                          "a dropped value cannot be made again");
    if (!known.emplace(next->producer.get(), true).second) continue;
    operations.push_back(next->producer);
    next->producer->for_each_input([&](const auto& input) { open.push_back(input.get()); });
  }
  std::sort(operations.begin(), operations.end(),
            [](const auto& left, const auto& right) { return left->index < right->index; });
  return operations;
}

}  // namespace

void attach_to_nothing(const at::Tensor& tensor) {
  torch::autograd::create_gradient_edge(
      const_cast<at::Tensor&>(tensor),
      memory::make_node<torch::autograd::Error>(
          "a gradient went past the inputs of a repeated forward"));
}

Geometry::Geometry(const at::Tensor& tensor)
    : keys_(tensor.key_set()),
      dtype_(tensor.dtype()),
      sizes_(tensor.sizes().begin(), tensor.sizes().end()),
      strides_(tensor.strides().begin(), tensor.strides().end()),
      offset_(tensor.storage_offset()) {}

bool Geometry::describes(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor._is_zerotensor() && !tensor.is_inference() &&
         !tensor.unsafeGetTensorImpl()->is_wrapped_number() &&
         !tensor.key_set().has(memory::kTrapKey);
}

at::Tensor Geometry::on(const c10::Storage& storage) const {
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys_, dtype_);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      at::IntArrayRef(sizes_.data(), sizes_.size()),
      at::IntArrayRef(strides_.data(), strides_.size()), offset_);
  return tensor;
}

Version::Version(const at::Tensor& tensor) {
  if (tensor.is_inference()) return;
  counter_ = tensor.unsafeGetTensorImpl()->version_counter();
  number_ = counter_.current_version();
}

double bring_back(const std::shared_ptr<Value>& value, bool for_good,
                  const std::function<void(const std::shared_ptr<Value>&)>& came_back) {
  const auto operations = needed_for(value);
  double flops = 0;
  Passing passing;
  auto& readers = passing.readers;
  for (const auto& operation : operations) {
    operation->for_each_input([&](const auto& input) { ++readers[input.get()]; });
  }
  for (const auto& operation : operations) {
    const Given given = run_again(*operation, passing);
    flops += operation->flops;
    operation->for_each_input([&](const auto& input) {
      if (--readers[input.get()] == 0) passing.memory.erase(input.get());
    });
    const auto take = [&](const std::vector<std::weak_ptr<Value>>& values,
                          const std::vector<c10::Storage>& storages) {
      for (size_t index = 0; index < values.size(); ++index) {
        const auto made = values[index].lock();
        if (!made || made->has_memory()) continue;
        ZP_CHECK(index < storages.size() && storages[index], "recompute of ", operation->name,
                 ": it gives or saves fewer tensors than in the forward, ", storages.size(),
                 "; expected that the same operator on the same tensors does the same");
        ZP_CHECK(static_cast<int64_t>(storages[index].nbytes()) == made->bytes, "recompute of ",
                 operation->name, ": expected ", made->bytes, " bytes, as in the forward, got ",
                 storages[index].nbytes());
        if (made->packs > 0) {
          made->hold(storages[index]);
          came_back(made);
        } else if (readers.contains(made.get()) && readers[made.get()] > 0) {
          passing.memory.emplace(made.get(), storages[index]);
        }
      }
    };
    take(operation->results, given.results);
    take(operation->saved, given.saved);
  }
  if (!for_good) return flops;
  for (const auto& operation : operations) {
    for (const auto* values : {&operation->results, &operation->saved}) {
      for (const auto& weak : *values) {
        const auto made = weak.lock();
        if (made && made->has_memory()) made->producer.reset();
      }
    }
  }
  return flops;
}

}  // namespace zeropage::checkpointing::detail

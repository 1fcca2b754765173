#include "checkpointing/detail/value_replay.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <unordered_map>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>

#include "checkpointing/detail/storage_bytes.h"
#include "operators/operator_interceptor.h"
#include "operators/operator_schema.h"
#include "operators/seeded_draws.h"
#include "zeropage/check.h"
#include "zeropage/saved_tensors.h"

namespace zeropage::checkpointing::detail {
namespace {

// Memory of values that pass within one replay, and how many of its operators still read a value.
struct Passing {
  std::unordered_map<const Value*, c10::Storage> memory;
  // Memory of kept values while operators read them, so that what is elsewhere is fetched once.
  std::unordered_map<const Value*, c10::Storage> fetched;
  std::unordered_map<const Value*, int> readers;

  bool last_reader_of(const Value& value) const {
    const auto found = readers.find(&value);
    return memory.contains(&value) && found != readers.end() && found->second == 1;
  }
};

c10::Storage memory_of(Value& value, Passing& passing) {
  if (value.memory.is_kept()) {
    const auto [known, is_new] = passing.fetched.try_emplace(&value);
    if (is_new) known->second = value.memory.get();
    return known->second;
  }
  const auto found = passing.memory.find(&value);
  TORCH_INTERNAL_ASSERT(found != passing.memory.end(), "a replay reads a value before it is there");
  return found->second;
}

void refuse_changed(bool unchanged, const Operation& operation) {
  ZP_CHECK(unchanged, "recompute of ", operation.name,
           ": a tensor that it reads was changed in place since the forward; change a clone, or "
           "run backward() before it changes");
}

at::Tensor input_of(const Operation::Tensor& input, const Operation& operation, Passing& passing) {
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
  for (const at::Tensor& tensor : operators::tensors_in(value)) {
    storages.push_back(tensor.defined() && tensor.has_storage() ? tensor.storage()
                                                                : c10::Storage());
  }
}

Given run_again(const Operation& operation, Passing& passing) {
  const operators::InterceptorScope unseen(nullptr);
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
  if (operation.seed) {
    operators::call_seeded(operation.handle, stack, *operation.seed);
  } else {
    operation.handle.callBoxed(&stack);
  }
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
    if (next->memory.is_kept()) continue;
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

// Runs operators again, in their order, until `value` has memory. Their other results that are dropped
// and still packed get memory too; what nobody saved passes. for_good: the producers of what came back
// are let go, since nothing will ask for it after its memory is gone again. came_back: is told each
// value that got memory. Returns the operators' FLOPs.
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
      if (--readers[input.get()] > 0) return;
      passing.memory.erase(input.get());
      passing.fetched.erase(input.get());
    });
    const auto take = [&](const std::vector<std::weak_ptr<Value>>& values,
                          const std::vector<c10::Storage>& storages) {
      for (size_t index = 0; index < values.size(); ++index) {
        const auto made = values[index].lock();
        if (!made || made->memory.is_kept()) continue;
        ZP_CHECK(index < storages.size() && storages[index], "recompute of ", operation->name,
                 ": it gives or saves fewer tensors than in the forward, ", storages.size(),
                 "; expected that the same operator on the same tensors does the same");
        ZP_CHECK(static_cast<int64_t>(storages[index].nbytes()) == made->bytes, "recompute of ",
                 operation->name, ": expected ", made->bytes, " bytes, as in the forward, got ",
                 storages[index].nbytes());
        if (made->packs > 0) {
          made->memory.keep_here(storages[index]);
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
        if (made && made->memory.is_kept()) made->producer.reset();
      }
    }
  }
  return flops;
}

}  // namespace

void ValueReplay::bring_back(const std::shared_ptr<Value>& value,
                             const std::function<void()>& drop_again_later) {
  const int backward = torch::autograd::get_current_graph_task_id();
  const bool in_backward = backward >= 0;
  const bool for_good = in_backward && !torch::autograd::get_current_graph_task_keep_graph();
  if (in_backward && !for_good && std::exchange(drops_again_after_, backward) != backward) {
    torch::autograd::Engine::get_default_engine().queue_callback(drop_again_later);
  }
  const memory::LedgerScope ledger(ledger_);
  const memory::KindScope kind(memory::Kind::kRecompute);
  const auto start = std::chrono::steady_clock::now();
  const double flops = detail::bring_back(value, for_good, [&](const std::shared_ptr<Value>& back) {
    if (!for_good) brought_back_.push_back(back);
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  account_.add_replay(flops, seconds.count());
}

void ValueReplay::drop_again() {
  for (const auto& weak : brought_back_) {
    const auto value = weak.lock();
    if (value && value->memory.is_kept() && value->packs > 0) value->memory.let_go();
  }
  brought_back_.clear();
}

}  // namespace zeropage::checkpointing::detail

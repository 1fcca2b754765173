#include "tests/harness/fake_accelerator/operators.h"

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include "tests/harness/fake_accelerator/counters.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "tests/harness/fake_accelerator/host_view.h"
#include "tests/harness/fake_accelerator/operator_manner.h"
#include "tests/harness/fake_accelerator/stream.h"

namespace zeropage::testing {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

Tensor for_host(const Tensor& tensor) {
  return tensor.is_cpu() ? host_snapshot(tensor) : host_view(tensor);
}

// LibTorch warns of out= arguments that its own operators resize.
class Quiet {
 public:
  Quiet() : guard_(&handler()) {}

 private:
  struct Handler final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  static Handler& handler() {
    static Handler handler;
    return handler;
  }
  c10::WarningUtils::WarningHandlerGuard guard_;
};

// What products keep, as cuBLAS does for each handle, which each thread has of its own, and stream.
class Workspaces {
 public:
  static Workspaces& of_process() {
    static auto* const instance = new Workspaces;
    return *instance;
  }
  void set(const memory::ProductWorkspaces& sizes) {
    std::map<Key, at::Tensor> let_go;
    const std::lock_guard lock(mutex_);
    sizes_ = sizes;
    let_go.swap(kept_);
  }
  void before(const std::string& name, c10::Device device) {
    const bool has_addend = name == "aten::addmm" || name == "aten::baddbmm";
    if (!has_addend && name != "aten::mm" && name != "aten::bmm") return;
    const std::lock_guard lock(mutex_);
    keep(Of::kProducts, sizes_.of_products, device);
    if (has_addend) keep(Of::kBiasedProducts, sizes_.of_biased_products, device);
  }

 private:
  enum class Of : uint8_t { kProducts, kBiasedProducts };
  using Key = std::tuple<Of, std::thread::id, c10::DeviceIndex, c10::StreamId>;

  // REQUIRES: mutex_.
  void keep(Of of, int64_t bytes, c10::Device device) {
    if (bytes == 0) return;
    const c10::StreamId stream = current_fake_stream(device.index()).id();
    at::Tensor& tensor = kept_[{of, std::this_thread::get_id(), device.index(), stream}];
    if (!tensor.defined()) tensor = at::empty({bytes}, at::device(device).dtype(at::kByte));
  }

  std::mutex mutex_;
  // Guarded by mutex_.
  memory::ProductWorkspaces sizes_;
  std::map<Key, at::Tensor> kept_;
};

class Call {
 public:
  // device: the current one.
  Call(const c10::OperatorHandle& op, Stack arguments, c10::Device device)
      : op_(op), arguments_(std::move(arguments)), device_(device) {}

  Stack run() {
    Workspaces::of_process().before(op_.operator_name().name, device_);
    Manner manner = manner_of(op_, arguments_);
    if (manner == Manner::kAsync) {
      if (std::optional<Stack> results = make_results_by_meta()) {
        start(*results);
        return *results;
      }
      manner = Manner::kCannotBeAsync;
    }
    ++(manner == Manner::kReadsValues ? live_counters().host_syncs : live_counters().not_async);
    return run_while_host_waits();
  }

 private:
  FakeStream& stream() const { return fake_stream(current_fake_stream(device_.index())); }
  void enqueue(Task task) const {
    std::string name = toString(op_.operator_name());
    count_launch(name);
    stream().enqueue(std::move(name), std::move(task));
  }

  // None where it, or an operator that it calls, has no meta kernel and its results need sizes.
  std::optional<Stack> make_results_by_meta() {
    TensorMap to_meta(c10::DeviceType::Meta, &meta_view);
    const Stack meta_arguments = to_meta.all(arguments_);
    Stack sizes = meta_arguments;
    const Quiet quiet;
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &sizes);
    } catch (const c10::NotImplementedError&) {
      if (!works_in_place()) return std::nullopt;
      return make_results({});
    }
    for (size_t index = 0; index < arguments_.size(); ++index)
      follow_resize(meta_arguments[index], arguments_[index], index);
    return make_results(sizes);
  }

  // It returns nothing but what it was given, and changes no sizes.
  bool works_in_place() const {
    const auto& returns = op_.schema().returns();
    const auto& arguments = op_.schema().arguments();
    return std::all_of(returns.begin(), returns.end(),
                       [](const auto& r) { return r.alias_info(); }) &&
           std::none_of(arguments.begin(), arguments.end(),
                        [](const auto& a) { return a.is_out(); });
  }

  // out= arguments take the result's sizes.
  void follow_resize(const IValue& meta, const IValue& argument, size_t index) const {
    const at::AliasInfo* alias = op_.schema().arguments()[index].alias_info();
    if (alias == nullptr || !alias->isWrite() || !meta.isTensor()) return;
    const Tensor& to = meta.toTensor();
    if (!to.defined() || to.sizes() == argument.toTensor().sizes()) return;
    argument.toTensor().resize_(to.sizes());
  }

  // Results on the fake device. sizes: the results on another one.
  Stack make_results(const Stack& sizes) {
    TensorMap allocate(device_, [this](const Tensor& like) {
      const auto options = at::TensorOptions(device_).dtype(like.dtype());
      return like.is_non_overlapping_and_dense()
                 ? at::empty_strided(like.sizes(), like.strides(), options)
                 : at::empty(like.sizes(), options);
    });
    Stack results;
    const auto& returns = op_.schema().returns();
    for (size_t index = 0; index < returns.size(); ++index) {
      const at::AliasInfo* alias = returns[index].alias_info();
      TORCH_CHECK(alias == nullptr || alias->isWrite(), op_.operator_name(),
                  " makes views, which the fake device does not know");
      results.push_back(alias ? argument_of(*alias) : allocate(sizes[index]));
    }
    return results;
  }

  const IValue& argument_of(const at::AliasInfo& written) const {
    const auto& arguments = op_.schema().arguments();
    const auto found = std::find_if(arguments.begin(), arguments.end(), [&](const auto& one) {
      return one.alias_info() && one.alias_info()->beforeSets() == written.beforeSets();
    });
    TORCH_INTERNAL_ASSERT(found != arguments.end());
    return arguments_[static_cast<size_t>(found - arguments.begin())];
  }

  // Views of what the operator allocates for itself, not of what it writes in place.
  Stack host_results(const Stack& results) const {
    TensorMap to_host(c10::DeviceType::CPU, &host_view);
    Stack views;
    for (size_t index = 0; index < results.size(); ++index) {
      const bool is_argument = op_.schema().returns()[index].alias_info() != nullptr;
      views.push_back(is_argument ? IValue() : to_host(results[index]));
    }
    return views;
  }

  static void copy(const IValue& to, const IValue& from) {
    std::vector<Tensor> sources;
    for_each_tensor(from, [&](const Tensor& tensor) { sources.push_back(tensor); });
    size_t next = 0;
    for_each_tensor(to, [&](const Tensor& tensor) { tensor.copy_(sources.at(next++)); });
  }

  // A written argument as the kernel sees it, and the memory that its values belong to: some
  // kernels resize an out= argument on the way (mse_loss).
  struct Written {
    Tensor argument;
    Tensor seen;
    Tensor home;
  };

  std::vector<Written> written(const Stack& host_arguments) const {
    std::vector<Written> found;
    for (size_t index = 0; index < arguments_.size(); ++index) {
      const at::AliasInfo* alias = op_.schema().arguments()[index].alias_info();
      if (alias == nullptr || !alias->isWrite() || !arguments_[index].isTensor()) continue;
      const Tensor& argument = arguments_[index].toTensor();
      found.push_back({argument, host_arguments[index].toTensor(), host_view(argument)});
    }
    return found;
  }

  static void bring_to_tier(const std::vector<Written>& written) {
    for (const Written& one : written)
      if (one.seen.const_data_ptr() != one.home.const_data_ptr()) one.home.copy_(one.seen);
  }

  void start(const Stack& results) const {
    TensorMap to_host(c10::DeviceType::CPU, &for_host);
    Stack arguments = to_host.all(arguments_);
    std::vector<Written> outs = written(arguments);
    // What is queued keeps no memory alive.
    for (Written& one : outs) one.argument = Tensor();
    enqueue([op = op_, arguments = std::move(arguments), outs = std::move(outs),
             to = host_results(results)] {
      const Quiet quiet;
      Stack stack = arguments;
      op.callBoxed(&stack);
      bring_to_tier(outs);
      for (size_t index = 0; index < to.size(); ++index) copy(to[index], stack[index]);
    });
  }

  Stack run_while_host_waits() {
    struct Outcome {
      Stack stack;
      std::exception_ptr error;
    };
    const auto outcome = std::make_shared<Outcome>();
    TensorMap to_host(c10::DeviceType::CPU, &for_host);
    outcome->stack = to_host.all(arguments_);
    std::vector<Written> outs = written(outcome->stack);
    enqueue([op = op_, outcome] {
      try {
        op.callBoxed(&outcome->stack);
      } catch (...) {
        outcome->error = std::current_exception();
      }
    });
    stream().wait();
    rethrow_task_error(device_.index());
    if (outcome->error) std::rethrow_exception(outcome->error);
    Stack results = make_results(outcome->stack);
    for (Written& one : outs) {
      if (one.seen.sizes() != one.argument.sizes()) one.argument.resize_(one.seen.sizes());
      one.home = host_view(one.argument);
      one.argument = Tensor();
    }
    stream().enqueue("a result", [outcome, outs = std::move(outs), to = host_results(results)] {
      bring_to_tier(outs);
      for (size_t index = 0; index < to.size(); ++index) copy(to[index], outcome->stack[index]);
    });
    return results;
  }

  const c10::OperatorHandle op_;
  const Stack arguments_;
  const c10::Device device_;
};

}  // namespace

void set_fake_workspaces(const memory::ProductWorkspaces& sizes) {
  Workspaces::of_process().set(sizes);
}

void run_on_fake_stream(const c10::OperatorHandle& op, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  Stack own(arguments.begin(), arguments.end());
  const c10::Device device = device_of(op.schema(), own);
  const c10::DeviceGuard on_device(device);
  const at::AutoDispatchBelowADInplaceOrView below;
  Stack results = Call(op, std::move(own), on_device.current_device()).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (IValue& result : results) stack->push_back(std::move(result));
}

}  // namespace zeropage::testing

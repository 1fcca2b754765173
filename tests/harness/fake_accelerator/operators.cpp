#include "tests/harness/fake_accelerator/operators.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include "tests/harness/fake_accelerator/counters.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "tests/harness/fake_accelerator/host_view.h"
#include "tests/harness/fake_accelerator/stream.h"

namespace zeropage::testing {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

template <typename Visit>
void for_each_tensor(const IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorList()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor> tensor : value.toOptionalTensorList())
      if (tensor && tensor->defined()) visit(*tensor);
  }
}

// Where the operator runs. As on a GPU, tensors of several devices do not mix, but for numbers and
// indices on the host.
c10::Device device_of(const c10::FunctionSchema& schema, const Stack& arguments) {
  const std::string_view name = schema.name();
  const bool indexes = name.find("index") != std::string_view::npos;
  std::optional<c10::Device> device;
  const auto see = [&](const Tensor& tensor) {
    if (tensor.is_cpu()) return;
    if (!device) device = tensor.device();
    TORCH_CHECK(*device == tensor.device(), name, ": tensors on ", *device, " and on ",
                tensor.device());
  };
  for (const IValue& argument : arguments) for_each_tensor(argument, see);
  for (const IValue& argument : arguments)
    if (!device && argument.isDevice()) device = argument.toDevice();
  TORCH_CHECK(device && device->is_privateuseone(), name, ": no argument is on a fake device");
  for (const IValue& argument : arguments) {
    for_each_tensor(argument, [&](const Tensor& tensor) {
      TORCH_CHECK(!tensor.is_cpu() || tensor.dim() == 0 || indexes, name, ": tensors on ", *device,
                  " and on cpu");
    });
  }
  return *device;
}

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

enum class Manner { kAsync, kReadsValues, kCannotBeAsync };

// An operator that may drop out, but is told not to, draws no numbers.
bool draws_numbers(const c10::OperatorHandle& op, const Stack& arguments) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  const std::optional<int> dropout = op.schema().argumentIndexWithName("dropout_p");
  return !dropout || arguments[static_cast<size_t>(*dropout)].toDouble() > 0;
}

Manner manner_of(const c10::OperatorHandle& op, const Stack& arguments) {
  const auto& returns = op.schema().returns();
  const bool returns_values = std::any_of(returns.begin(), returns.end(), [](const auto& one) {
    return !one.type()->isSubtypeOf(*c10::OptionalType::ofTensor()) &&
           !one.type()->isSubtypeOf(*c10::ListType::ofTensors());
  });
  if (returns_values || op.hasTag(at::Tag::dynamic_output_shape) ||
      op.hasTag(at::Tag::data_dependent_output))
    return Manner::kReadsValues;
  // One generator serves all, so draws keep the host's order.
  if (draws_numbers(op, arguments)) return Manner::kCannotBeAsync;
  return Manner::kAsync;
}

class Call {
 public:
  // device: the current one.
  Call(const c10::OperatorHandle& op, Stack arguments, c10::Device device)
      : op_(op), arguments_(std::move(arguments)), device_(device) {}

  Stack run() {
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
    ++live_counters().tasks;
    stream().enqueue(toString(op_.operator_name()), std::move(task));
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

  // An out= argument as the kernel sees it, and the memory that its values belong to: some kernels
  // resize the argument on the way (mse_loss).
  struct Written {
    Tensor seen;
    Tensor home;
  };

  std::vector<Written> written(const Stack& host_arguments) const {
    std::vector<Written> found;
    for (size_t index = 0; index < arguments_.size(); ++index) {
      const at::AliasInfo* alias = op_.schema().arguments()[index].alias_info();
      if (alias == nullptr || !alias->isWrite() || !arguments_[index].isTensor()) continue;
      found.push_back({host_arguments[index].toTensor(), host_view(arguments_[index].toTensor())});
    }
    return found;
  }

  static void bring_home(const std::vector<Written>& written) {
    for (const auto& [seen, home] : written)
      if (seen.const_data_ptr() != home.const_data_ptr()) home.copy_(seen);
  }

  void start(const Stack& results) const {
    TensorMap to_host(c10::DeviceType::CPU, &for_host);
    Stack arguments = to_host.all(arguments_);
    std::vector<Written> outs = written(arguments);
    enqueue([op = op_, arguments = std::move(arguments), outs = std::move(outs),
             to = host_results(results)] {
      const Quiet quiet;
      Stack stack = arguments;
      op.callBoxed(&stack);
      bring_home(outs);
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
    stream().enqueue("a result", [outcome, to = host_results(results)] {
      for (size_t index = 0; index < to.size(); ++index) copy(to[index], outcome->stack[index]);
    });
    return results;
  }

  const c10::OperatorHandle op_;
  const Stack arguments_;
  const c10::Device device_;
};

}  // namespace

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

#include "tests/harness/fake_accelerator/operator_manner.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include <ATen/ATen.h>

#include "tests/harness/fake_accelerator/host_view.h"

namespace zeropage::testing {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// An operator that may drop out, but is told not to, draws no numbers.
bool draws_numbers(const c10::OperatorHandle& op, const Stack& arguments) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  const std::optional<int> dropout = op.schema().argumentIndexWithName("dropout_p");
  return !dropout || arguments[static_cast<size_t>(*dropout)].toDouble() > 0;
}

}  // namespace

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
  for (size_t index = 0; index < arguments.size(); ++index) {
    const at::AliasInfo* alias = schema.arguments()[index].alias_info();
    const bool is_written = alias != nullptr && alias->isWrite();
    for_each_tensor(arguments[index], [&](const Tensor& tensor) {
      TORCH_CHECK(!tensor.is_cpu() || (!is_written && (tensor.dim() == 0 || indexes)), name,
                  ": tensors on ", *device, " and on cpu");
    });
  }
  return *device;
}

}  // namespace zeropage::testing

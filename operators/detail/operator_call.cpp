#include "operators/detail/operator_call.h"

#include <algorithm>
#include <string_view>
#include <unordered_set>

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace zeropage::operators::detail {
namespace {

// The first argument that `matches`, by its type without "optional".
template <typename Matches>
std::optional<size_t> find(const c10::FunctionSchema& schema, Matches matches) {
  for (size_t index = 0; index < schema.arguments().size(); ++index) {
    const c10::Argument& argument = schema.arguments()[index];
    c10::TypePtr type = argument.type();
    if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (matches(argument, type->kind())) return index;
  }
  return std::nullopt;
}

}  // namespace

OperatorCall::OperatorCall(const c10::OperatorHandle& handle, torch::jit::Stack& stack)
    : handle(handle),
      stack(stack),
      first(stack.size() - handle.schema().arguments().size()),
      name(handle.operator_name().name) {
  for (size_t index = 0; index < argument_count(); ++index) {
    const c10::Argument& declared = schema().arguments()[index];
    for (at::Tensor& tensor : tensors_in(argument(index))) {
      if (!tensor.defined()) continue;
      const bool written = is_written(declared);
      operands.push_back({std::move(tensor), written, written && declared.kwarg_only()});
    }
  }
}

std::optional<size_t> OperatorCall::dtype_argument() const {
  return find(schema(), [](const c10::Argument& argument, c10::TypeKind kind) {
    return kind == c10::TypeKind::IntType && argument.name() == "dtype";
  });
}

std::optional<size_t> OperatorCall::device_argument() const {
  return find(schema(), [](const c10::Argument& argument, c10::TypeKind kind) {
    return kind == c10::TypeKind::DeviceObjType && argument.name() == "device";
  });
}

bool OperatorCall::makes_literal() const {
  // torch::tensor asks for memory below autograd but above ADInplaceOrView, on the CPU by name, and
  // nobody else does.
  const c10::DispatchKeySet excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  if (name != "aten::empty" || !excluded.has(c10::DispatchKey::AutogradFunctionality) ||
      excluded.has(c10::DispatchKey::ADInplaceOrView)) {
    return false;
  }
  const auto device = device_argument();
  return device && argument(*device).isDevice() && argument(*device).toDevice().is_cpu();
}

bool OperatorCall::has_values() const {
  if (operands.empty()) return makes_literal();
  return !draws(handle) && std::none_of(operands.begin(), operands.end(), [](const auto& operand) {
    return operand.tensor.is_meta();
  });
}

bool OperatorCall::reads_values() const {
  if (handle.hasTag(at::Tag::data_dependent_output)) return true;
  if (handle.hasTag(at::Tag::dynamic_output_shape)) return true;
  const auto& returns = schema().returns();
  return std::any_of(returns.begin(), returns.end(), [](const c10::Argument& declared) {
    return !declared.type()->isSubtypeOf(*c10::TensorType::get()) &&
           declared.type()->kind() != c10::TypeKind::ListType;
  });
}

bool OperatorCall::changes_geometry_only() const {
  return handle.hasTag(at::Tag::inplace_view);
}

bool OperatorCall::overwrites(const Operand& operand) const {
  static const std::unordered_set<std::string_view> kNames = {
      "aten::fill_",         "aten::zero_",   "aten::copy_",      "aten::uniform_",
      "aten::normal_",       "aten::random_", "aten::bernoulli_", "aten::exponential_",
      "aten::log_normal_",   "aten::cauchy_", "aten::geometric_", "aten::_foreach_zero_",
      "aten::_foreach_copy_"};
  const at::Tensor& tensor = operand.tensor;
  return operand.written && (operand.is_out || kNames.contains(name)) &&
         tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
         tensor.nbytes() == tensor.storage().nbytes();
}

}  // namespace zeropage::operators::detail

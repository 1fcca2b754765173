#include "operators/operator_schema.h"

#include <algorithm>

namespace zeropage::operators {

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<at::Tensor> tensors;
  if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) {
      tensors.push_back(tensor.value_or(at::Tensor()));
    }
  }
  return tensors;
}

bool is_written(const c10::Argument& argument) {
  const c10::AliasInfo* alias = argument.alias_info();
  if (alias == nullptr) return false;
  const auto& contained = alias->containedTypes();  // of a list
  return alias->isWrite() || std::any_of(contained.begin(), contained.end(),
                                         [](const auto& inner) { return inner.isWrite(); });
}

std::optional<size_t> generator_argument(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  for (size_t index = 0; index < arguments.size(); ++index) {
    c10::TypePtr type = arguments[index].type();
    if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) return index;
  }
  return std::nullopt;
}

bool draws(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded) || generator_argument(op).has_value();
}

bool only_views(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::inplace_view)) return true;
  const auto& returns = op.schema().returns();
  if (returns.empty()) return false;
  const at::AliasInfo* alias = returns.front().alias_info();
  return alias != nullptr && !alias->isWrite();
}

}  // namespace zeropage::operators

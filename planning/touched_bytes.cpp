#include "planning/touched_bytes.h"

#include "checkpointing/detail/operator_facts.h"

namespace zeropage::planning {
namespace {

double bytes_of(at::ArrayRef<c10::IValue> values) {
  double bytes = 0;
  for (const c10::IValue& value : values) {
    if (value.isTensor() && value.toTensor().defined()) {
      bytes += static_cast<double>(value.toTensor().nbytes());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        bytes += static_cast<double>(tensor.nbytes());
      }
    }
  }
  return bytes;
}

}  // namespace

void TouchedBytes::run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                       torch::jit::Stack& stack) {
  const auto& facts = checkpointing::detail::facts_of(handle);
  // What it is made of comes here too.
  if (facts.is_composite) return operators::run_operator_from_outside(handle, keys, stack);
  const auto arguments = torch::jit::last(stack, handle.schema().arguments().size());
  const bool is_counted =
      !facts.only_views && checkpointing::detail::flops_of(facts, arguments) == 0;
  if (is_counted) bytes_ += bytes_of(arguments);
  operators::run_operator(handle, keys, stack);
  if (is_counted) bytes_ += bytes_of(torch::jit::last(stack, handle.schema().returns().size()));
}

}  // namespace zeropage::planning

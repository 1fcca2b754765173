#include "checkpointing/detail/region_inputs.h"

#include <utility>

#include "checkpointing/detail/recorded_forward.h"
#include "zeropage/check.h"

namespace zeropage::checkpointing::detail {

void RegionInputs::keep(const at::Tensor& tensor, const std::string& name, const std::string& who) {
  Input input{.name = name};
  if (tensor.defined()) {
    input.requires_grad = tensor.requires_grad();
    input.is_leaf = tensor.is_leaf();
    if (enclosing_) {
      input.packed = enclosing_->pack(tensor);
    } else {
      // An alias with a version of its own: a repetition may change it in place and put it back.
      input.packed = checkpointing::keep(tensor.variable_data(), who);
      input.checked = tensor.detach();
    }
  }
  inputs_.push_back(std::move(input));
}

void RegionInputs::end_forward() {
  for (Input& input : inputs_) {
    if (input.checked.defined() && !input.checked.is_inference()) {
      input.version = input.checked._version();
    }
  }
}

void RegionInputs::check_unchanged(const std::string& who) const {
  for (const Input& input : inputs_) {
    if (!input.checked.defined() || input.checked.is_inference()) continue;
    ZP_CHECK(
        input.checked._version() == input.version, who, ": ", input.name, " of sizes ",
        input.checked.sizes(), " was changed in place after the region (version ", input.version,
        " then, ", input.checked._version(),
        " now), so it cannot be repeated; change a clone, or run backward() before it changes");
  }
}

at::Tensor RegionInputs::next() {
  Input& input = inputs_.at(next_++);
  if (!input.packed) return {};
  at::Tensor tensor = input.packed->unpack().variable_data();
  if (!input.requires_grad) return tensor;
  if (input.is_leaf) {
    tensor.requires_grad_();
  } else {
    attach_to_nothing(tensor);
  }
  return tensor;
}

}  // namespace zeropage::checkpointing::detail

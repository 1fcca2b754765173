#include "checkpointing/detail/recorded_forward.h"

#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/variable.h>

#include "base/libtorch_release.h"
#include "operators/dispatch_keys.h"

namespace zeropage::checkpointing::detail {

void attach_to_nothing(const at::Tensor& tensor) {
  torch::autograd::create_gradient_edge(
      const_cast<at::Tensor&>(tensor),
      base::make_node<torch::autograd::Error>(
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
         !tensor.key_set().has(operators::kTrapKey);
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

bool Value::can_be_made_again() const {
  if (source != Source::kOperator || !producer || !producer->replayable) return false;
  if (!producer->lacks_inputs) return true;
  bool are_there = true;
  producer->for_each_input([&](const auto& input) {
    are_there = are_there && (input->memory.is_kept() || input->can_be_made_again());
  });
  // What is saved is there until nobody needs it.
  producer->lacks_inputs = !are_there;
  return are_there;
}

}  // namespace zeropage::checkpointing::detail

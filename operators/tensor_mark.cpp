#include "operators/tensor_mark.h"

#include <algorithm>

#include <c10/core/InferenceMode.h>

#include "operators/dispatch_keys.h"
#include "zeropage/check.h"

namespace zeropage::operators {

void add_trap_key(const at::Tensor& tensor) {
  if (tensor.key_set().has(kTrapKey)) return;
  // An inference tensor's keys are others.
  const c10::InferenceMode off(false);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const auto trapped = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(tensor.storage()), impl->key_set().add(kTrapKey), tensor.dtype());
  trapped->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  impl->shallow_copy_from(trapped);
}

TensorMark* mark_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  return dynamic_cast<TensorMark*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

void set_mark(const at::Tensor& tensor, c10::intrusive_ptr<TensorMark> mark) {
  const TensorMark* const before = mark_of(tensor);
  ZP_CHECK(before == nullptr, mark->who(), ": expected a tensor without a mark, but there is one, ",
           before->who(), "; mark a module once");
  add_trap_key(tensor);
  tensor.unsafeGetTensorImpl()->set_backend_meta(std::move(mark));
}

bool is_replaced(const c10::OperatorHandle& handle, at::ArrayRef<c10::IValue> arguments) {
  return std::any_of(arguments.begin(), arguments.end(), [&](const c10::IValue& argument) {
    const TensorMark* const mark = argument.isTensor() ? mark_of(argument.toTensor()) : nullptr;
    return mark != nullptr && mark->replaces(handle);
  });
}

bool may_be_paged(const at::Tensor& tensor) {
  if (!tensor.key_set().has(kTrapKey)) return false;
  const TensorMark* const mark = mark_of(tensor);
  return mark == nullptr || mark->on() == TensorMark::On::kParameter;
}

}  // namespace zeropage::operators

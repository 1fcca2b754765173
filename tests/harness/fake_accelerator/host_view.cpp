#include "tests/harness/fake_accelerator/host_view.h"

#include <utility>

#include <ATen/ATen.h>

#include "zeropage/ledger.h"

namespace zeropage::testing {
namespace {

// A number that C++ code wrote beside a tensor stays one: its dtype does not count.
at::Tensor like_number(at::Tensor made, const at::Tensor& tensor) {
  const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  if (is_number) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  auto* start = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  const int64_t offset_bytes =
      tensor.storage_offset() * static_cast<int64_t>(tensor.dtype().itemsize());
  void* data = start == nullptr ? nullptr : start + offset_bytes;
  TORCH_CHECK(data != nullptr || tensor.numel() == 0, "a tensor of sizes ", tensor.sizes(), " on ",
              tensor.device(), " has no memory");
  return like_number(at::for_blob(data, tensor.sizes())
                         .strides(tensor.strides())
                         .options(at::TensorOptions().dtype(tensor.dtype()))
                         .target_device(at::kCPU)
                         .allocator(at::getCPUAllocator())
                         .resizeable_storage()
                         .make_tensor(),
                     tensor);
}

at::Tensor meta_view(const at::Tensor& tensor) {
  return like_number(at::empty_strided(tensor.sizes(), tensor.strides(),
                                       at::TensorOptions(at::kMeta).dtype(tensor.dtype())),
                     tensor);
}

at::Tensor host_snapshot(const at::Tensor& tensor) {
  const memory::LedgerScope of_nobody(memory::Ledger::process());
  return like_number(tensor.clone(), tensor);
}

at::Tensor TensorMap::map(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  at::Tensor& mapped = known_[tensor.unsafeGetTensorImpl()];
  if (!mapped.defined()) mapped = function_(tensor);
  return mapped;
}

c10::IValue TensorMap::operator()(const c10::IValue& value) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorList()) mapped.push_back(map(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      mapped.push_back(tensor ? std::optional(map(*tensor)) : std::nullopt);
    return mapped;
  }
  if (value.isDevice()) return device_;
  return value;
}

torch::jit::Stack TensorMap::all(const torch::jit::Stack& values) {
  torch::jit::Stack mapped;
  for (const c10::IValue& value : values) mapped.push_back((*this)(value));
  return mapped;
}

}  // namespace zeropage::testing

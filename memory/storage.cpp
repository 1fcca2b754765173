#include "memory/storage.h"

#include <cstring>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include "memory/exact.h"

namespace zeropage::memory {

namespace {

// The bytes of `flat` from element `offset` on; keeps `flat` alive.
c10::DataPtr data_within(const at::Tensor& flat, int64_t offset, int64_t bytes) {
  TORCH_INTERNAL_ASSERT(flat.dim() == 1 && flat.is_contiguous() && flat.device().is_cpu());
  const int64_t first = offset * narrow<int64_t>(flat.element_size());
  TORCH_INTERNAL_ASSERT(first >= 0 && first + bytes <= narrow<int64_t>(flat.nbytes()));
  return {static_cast<char*>(flat.data_ptr()) + first, new at::Tensor(flat),
          [](void* kept) { delete static_cast<at::Tensor*>(kept); }, flat.device()};
}

}  // namespace

int64_t storage_numel(const at::Tensor& tensor) {
  return div_exact(narrow<int64_t>(tensor.storage().nbytes()),
                   narrow<int64_t>(tensor.element_size()));
}

void move_storage_into(const at::Tensor& tensor, const at::Tensor& flat, int64_t offset) {
  TORCH_INTERNAL_ASSERT(flat.scalar_type() == tensor.scalar_type() &&
                        flat.device() == tensor.device());
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const auto bytes = narrow<int64_t>(storage->nbytes());
  c10::DataPtr target = data_within(flat, offset, bytes);
  if (bytes > 0) std::memcpy(target.get(), storage->data(), static_cast<size_t>(bytes));
  storage->set_data_ptr_noswap(std::move(target));
}

void drop_memory(c10::StorageImpl& storage) {
  storage.set_data_ptr_noswap({nullptr, storage.device()});
}

c10::Storage storage_within(const at::Tensor& flat, int64_t offset, int64_t numel) {
  const int64_t bytes = numel * narrow<int64_t>(flat.element_size());
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                               data_within(flat, offset, bytes),
                                               /*allocator=*/nullptr, /*resizable=*/false);
}

c10::Storage storage_without_memory(int64_t bytes) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes,
      c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)), /*allocator=*/nullptr,
      /*resizable=*/false);
}

void adopt_storage(const at::Tensor& tensor, const c10::Storage& storage) {
  const c10::InferenceMode off(false);
  const at::NoGradGuard no_grad;
  const at::Tensor there =
      at::empty({0}, tensor.options().device(storage.device()).requires_grad(false))
          .set_(storage, tensor.storage_offset(), tensor.sizes(), tensor.strides());
  tensor.unsafeGetTensorImpl()->shallow_copy_from(there.getIntrusivePtr());
}

at::Tensor whole_storage(const at::Tensor& tensor) {
  return at::empty({0}, tensor.options().requires_grad(false))
      .set_(tensor.storage(), 0, {storage_numel(tensor)});
}

}  // namespace zeropage::memory

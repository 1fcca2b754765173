#include "memory/storage.h"

#include <utility>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include "base/exact.h"
#include "zeropage/check.h"

namespace zeropage::memory {

c10::DataPtr data_within(const at::Tensor& flat, int64_t offset, int64_t bytes) {
  TORCH_INTERNAL_ASSERT(flat.dim() == 1 && flat.is_contiguous());
  const int64_t first = offset * base::narrow<int64_t>(flat.element_size());
  TORCH_INTERNAL_ASSERT(first >= 0 && first + bytes <= base::narrow<int64_t>(flat.nbytes()));
  auto* data = static_cast<char*>(flat.data_ptr());
  return {data == nullptr ? nullptr : data + first, new at::Tensor(flat),
          [](void* kept) { delete static_cast<at::Tensor*>(kept); }, flat.device()};
}

int64_t storage_numel(const at::Tensor& tensor) {
  return base::div_exact(base::narrow<int64_t>(tensor.storage().nbytes()),
                         base::narrow<int64_t>(tensor.element_size()));
}

void move_storage_into(const at::Tensor& tensor, const at::Tensor& flat, int64_t offset) {
  TORCH_INTERNAL_ASSERT(flat.scalar_type() == tensor.scalar_type() &&
                        flat.device() == tensor.device());
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const auto bytes = base::narrow<int64_t>(storage->nbytes());
  c10::DataPtr target = data_within(flat, offset, bytes);
  // One on the meta device has nowhere to copy to.
  if (bytes > 0 && target.get() != nullptr) {
    const at::NoGradGuard no_grad;
    flat.narrow(0, offset, storage_numel(tensor)).copy_(whole_storage(tensor));
  }
  storage->set_data_ptr_noswap(std::move(target));
}

void drop_memory(c10::StorageImpl& storage) {
  storage.set_data_ptr_noswap({nullptr, storage.device()});
}

void give_memory(c10::StorageImpl& storage, const at::Tensor& flat) {
  TORCH_INTERNAL_ASSERT(flat.device() == storage.device());
  storage.set_data_ptr_noswap(data_within(flat, 0, base::narrow<int64_t>(storage.nbytes())));
}

c10::Storage storage_within(const at::Tensor& flat, int64_t offset, int64_t numel) {
  const int64_t bytes = numel * base::narrow<int64_t>(flat.element_size());
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                               data_within(flat, offset, bytes),
                                               /*allocator=*/nullptr, /*resizable=*/false);
}

c10::Storage storage_without_memory(int64_t bytes, c10::Device device) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                               c10::DataPtr(nullptr, device),
                                               /*allocator=*/nullptr, /*resizable=*/false);
}

at::Tensor tensor_in(const c10::Storage& storage, const at::Tensor& like, int64_t offset,
                     at::ScalarType dtype) {
  at::Tensor tensor =
      at::empty({0}, like.options().dtype(dtype).device(storage.device()).requires_grad(false));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_and_strides(like.sizes(), like.strides(), offset);
  return tensor;
}

at::Tensor flat_over(const c10::Storage& storage, at::ScalarType dtype) {
  at::Tensor flat = at::empty({0}, at::TensorOptions(storage.device()).dtype(dtype));
  c10::TensorImpl* impl = flat.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_contiguous({base::div_exact(base::narrow<int64_t>(storage.nbytes()),
                                              base::narrow<int64_t>(c10::elementSize(dtype)))});
  return flat;
}

void adopt_storage(const at::Tensor& tensor, const c10::Storage& storage, at::ScalarType dtype) {
  const c10::InferenceMode off(false);
  const at::NoGradGuard no_grad;
  const at::Tensor there = tensor_in(storage, tensor, tensor.storage_offset(), dtype);
  tensor.unsafeGetTensorImpl()->shallow_copy_from(there.getIntrusivePtr());
}

at::Tensor whole_storage(const at::Tensor& tensor) {
  at::Tensor whole = at::empty({0}, tensor.options().requires_grad(false));
  whole.unsafeGetTensorImpl()->set_storage_keep_dtype(tensor.storage());
  whole.unsafeGetTensorImpl()->set_sizes_contiguous({storage_numel(tensor)});
  return whole;
}

void write_values(const at::Tensor& tensor, const at::Tensor& values, const std::string& what) {
  at::Tensor to = tensor, from = values;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) != 0 || tensor.size(dim) < 2) continue;
    const at::Tensor once = from.narrow(dim, 0, 1);
    // By bits: a NaN is the same as itself here. On the meta device there are none.
    const auto bytes = [](const at::Tensor& of) { return of.contiguous().view(at::kByte); };
    ZP_CHECK(from.is_meta() || at::equal(bytes(from), bytes(once.expand_as(from))), what,
             ": dimension ", dim, " is expanded (stride 0), so that its ", tensor.size(dim),
             " elements are one, and the values to write differ along it; register the buffer's "
             "contiguous()");
    to = to.narrow(dim, 0, 1);
    from = once;
  }
  to.copy_(from);
}

}  // namespace zeropage::memory

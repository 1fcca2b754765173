// Allocation and views: no values are read or written.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>

#include "tests/harness/fake_accelerator/allocator.h"
#include "tests/harness/fake_accelerator/guard.h"
#include "tests/harness/fake_accelerator/kernels.h"
#include "tests/harness/fake_accelerator/stream.h"

namespace zeropage::testing {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Flag = std::optional<bool>;
using Format = std::optional<at::MemoryFormat>;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(IntArrayRef sizes, Dtype dtype, Layout, Device device, Flag, Format format) {
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_generic(sizes, fake_allocator(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, Dtype dtype, Layout, Device device,
                     Flag) {
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_strided_generic(sizes, strides, fake_allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

// LibTorch's own would grow the storage and copy its values at once, past the streams.
void grow(const c10::Storage& storage, size_t bytes) {
  if (storage.nbytes() < bytes) resize_fake_storage(storage, bytes);
}

const Tensor& resize(const Tensor& self, IntArrayRef sizes, Format format) {
  grow(self.storage(),
       at::detail::computeStorageNbytesContiguous(sizes, self.dtype().itemsize(),
                                                  static_cast<size_t>(self.storage_offset())));
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_empty(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  const c10::Storage none(c10::Storage::use_byte_size_t(), 0, fake_allocator()->allocate(0),
                          fake_allocator(), true);
  return at::native::set_storage_cpu_(self, none, 0, {0}, {});
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

// set_data(), which Module::to calls, may move a dense tensor between host and device.
bool may_become(const Tensor& self, const Tensor& from) {
  const auto is_dense = [](const Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_privateuseone());
  };
  return is_dense(self) && is_dense(from);
}

Tensor& set_storage_part(Tensor& self, at::Storage source, int64_t offset, IntArrayRef sizes,
                         IntArrayRef strides) {
  const auto start = static_cast<size_t>(offset);
  const size_t itemsize = self.dtype().itemsize();
  grow(source, strides.empty() ? at::detail::computeStorageNbytesContiguous(sizes, itemsize, start)
                               : at::detail::computeStorageNbytes(sizes, strides, itemsize, start));
  return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
}

void record_stream(Tensor& self, at::Stream stream) {
  record_on_fake_stream(self.storage().data_ptr(), stream);
}

}  // namespace

void add_storage_kernels(torch::Library& aten) {
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("as_strided", &at::native::as_strided_tensorimpl);
  aten.impl("view", &at::native::view);
  aten.impl("_reshape_alias", &at::native::_reshape_alias);
  aten.impl("unfold", &at::native::unfold);
  aten.impl("view_as_real", &at::native::view_as_real);
  aten.impl("resize_", &resize);
  aten.impl("set_", &set_empty);
  aten.impl("set_.source_Storage", &set_storage);
  aten.impl("set_.source_Storage_storage_offset", &set_storage_part);
  aten.impl("set_.source_Tensor", &at::native::set_tensor_);
  aten.impl("is_set_to", &at::native::is_set_to);
  aten.impl("_has_compatible_shallow_copy_type", &may_become);
  aten.impl("record_stream", &record_stream);
}

void resize_fake_storage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr grown = fake_allocator()->allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0 && storage.data() != nullptr)
    fake_allocator()->copy_data(grown.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
  storage.set_nbytes(bytes);
}

}  // namespace zeropage::testing

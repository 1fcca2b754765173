// Gives a tensor's storage other memory in place.
//
// The StorageImpl stays the same object, so every tensor that shares it (tied parameters, views,
// tensors saved by autograd) sees the new memory; a replaced Tensor would leave them behind.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>

namespace zeropage::memory {

// Copies the storage of `tensor` into `flat` from element `offset` on and makes it live there.
// flat: 1-D, contiguous, same dtype and device; stays alive as long as any storage lives in it.
// Throws if the storage does not fit.
void move_storage_into(const at::Tensor& tensor, const at::Tensor& flat, int64_t offset);

// Frees the storage's memory; the storage keeps its size. Its pointer is null until it gets other memory.
void drop_memory(c10::StorageImpl& storage);

// Makes the storage, which has as many bytes, live in `flat`, without a copy of what it had.
void give_memory(c10::StorageImpl& storage, const at::Tensor& flat);

// `bytes` of the memory of `flat`, from element `offset` on; keeps it alive.
c10::DataPtr data_within(const at::Tensor& flat, int64_t offset, int64_t bytes);
// A storage of numel elements in `flat`, from element `offset` on; it keeps `flat` alive.
c10::Storage storage_within(const at::Tensor& flat, int64_t offset, int64_t numel);
// A storage of that many bytes with a null pointer.
c10::Storage storage_without_memory(int64_t bytes, c10::Device device);

// A tensor of the sizes and strides of `like` over `storage`, from element `offset` on.
// Elsewhere set_() does the same; on the meta device it would resize the storage.
at::Tensor tensor_in(const c10::Storage& storage, const at::Tensor& like, int64_t offset,
                     at::ScalarType dtype);

// All of `storage`. [its bytes / the element's]
at::Tensor flat_over(const c10::Storage& storage, at::ScalarType dtype);

// Makes `tensor` live in `storage`, of elements of that dtype, on the storage's device, with the
// sizes and strides it has. The TensorImpl stays the same object; other tensors over its former
// storage stay there.
void adopt_storage(const at::Tensor& tensor, const c10::Storage& storage, at::ScalarType dtype);

// The tensor's whole storage. [storage_numel(tensor)]
at::Tensor whole_storage(const at::Tensor& tensor);

// Copies `values`, of its sizes and of any dtype, into the tensor, as copy_() does. An expanded dimension (stride 0) has one address for all
// of its elements, and copy_() refuses to write there; here their value is written once. what: "buffer \"mask\"". Throws, having
// written nothing, where the values differ along such a dimension.
void write_values(const at::Tensor& tensor, const at::Tensor& values, const std::string& what);

// Elements in the tensor's whole storage, which may exceed numel() where several tensors share it.
int64_t storage_numel(const at::Tensor& tensor);

}  // namespace zeropage::memory

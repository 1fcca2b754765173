// Gives a tensor's storage other memory in place.
//
// The StorageImpl stays the same object, so every tensor that shares it (tied parameters, views,
// tensors saved by autograd) sees the new memory; a replaced Tensor would leave them behind.
#pragma once

#include <cstdint>

#include <ATen/core/TensorBody.h>

namespace zeropage::memory {

// Copies the storage of `tensor` into `flat` from element `offset` on and makes it live there.
// flat: 1-D, contiguous, same dtype and device; stays alive as long as any storage lives in it.
// Throws if the storage does not fit.
void move_storage_into(const at::Tensor& tensor, const at::Tensor& flat, int64_t offset);

// Elements in the tensor's whole storage, which may exceed numel() where several tensors share it.
int64_t storage_numel(const at::Tensor& tensor);

}  // namespace zeropage::memory

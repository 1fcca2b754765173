// A storage as its bytes, whatever lies in it.
#pragma once

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

namespace zeropage::checkpointing::detail {

// On the storage: [bytes], uint8.
inline at::Tensor bytes_of(const c10::Storage& storage) {
  const at::NoGradGuard no_grad;
  at::Tensor whole = at::empty({0}, at::TensorOptions(storage.device()).dtype(at::kByte));
  return whole.set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
}

inline c10::Storage copy_of(const c10::Storage& storage) {
  const at::NoGradGuard no_grad;
  return bytes_of(storage).clone().storage();
}

}  // namespace zeropage::checkpointing::detail

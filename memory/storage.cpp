#include "memory/storage.h"

#include <cstring>

#include "memory/exact.h"

namespace zeropage::memory {

int64_t storage_numel(const at::Tensor& tensor) {
  return div_exact(narrow<int64_t>(tensor.storage().nbytes()),
                   narrow<int64_t>(tensor.element_size()));
}

void move_storage_into(const at::Tensor& tensor, const at::Tensor& flat, int64_t offset) {
  TORCH_INTERNAL_ASSERT(flat.dim() == 1 && flat.is_contiguous());
  TORCH_INTERNAL_ASSERT(flat.scalar_type() == tensor.scalar_type() &&
                        flat.device() == tensor.device() && flat.device().is_cpu());
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const auto bytes = narrow<int64_t>(storage->nbytes());
  const auto first = offset * narrow<int64_t>(flat.element_size());
  TORCH_INTERNAL_ASSERT(first >= 0 && first + bytes <= narrow<int64_t>(flat.nbytes()));
  char* target = static_cast<char*>(flat.data_ptr()) + first;
  if (bytes > 0) std::memcpy(target, storage->data(), static_cast<size_t>(bytes));
  auto* keeps_flat_alive = new at::Tensor(flat);
  storage->set_data_ptr_noswap(c10::DataPtr(
      target, keeps_flat_alive, [](void* kept) { delete static_cast<at::Tensor*>(kept); },
      flat.device()));
}

}  // namespace zeropage::memory

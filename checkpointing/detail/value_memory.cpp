#include "checkpointing/detail/value_memory.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "checkpointing/detail/storage_bytes.h"

namespace zeropage::checkpointing::detail {
namespace {

// The storage as a vector of the tensor's type and version, without a graph: [numel]
at::Tensor all_of_storage(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto numel = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
  const at::Tensor flat = tensor.as_strided({numel}, {1}, 0);
  flat.unsafeGetTensorImpl()->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
  return flat;
}

}  // namespace

void ValueMemory::keep_here(c10::Storage storage) {
  let_go();
  here_ = std::move(storage);
  if (!counts_) return;
  counts_->all += bytes_;
  counts_->here += bytes_;
}

void ValueMemory::keep(const at::Tensor& tensor, const std::shared_ptr<SavedTensorHooks>& onward) {
  onward_ = onward;
  const bool is_whole = tensor.storage().nbytes() % tensor.itemsize() == 0;
  if (onward_ && is_whole) {
    hand_on(all_of_storage(tensor));
  } else {
    keep_here(tensor.storage());
  }
}

void ValueMemory::keep_copy_of(const c10::Storage& storage) {
  c10::Storage copy = copy_of(storage);
  if (onward_) {
    hand_on(bytes_of(copy));
  } else {
    keep_here(std::move(copy));
  }
}

void ValueMemory::hand_on(const at::Tensor& flat) {
  let_go();
  elsewhere_ = onward_->pack(flat);
  if (counts_) counts_->all += bytes_;
}

void ValueMemory::let_go() {
  if (counts_ && is_kept()) counts_->all -= bytes_;
  if (counts_ && is_here()) counts_->here -= bytes_;
  here_ = c10::Storage();
  elsewhere_.reset();
  fetched_.reset();
}

c10::Storage ValueMemory::get() {
  if (is_here()) return here_;
  if (auto last = fetched_ ? fetched_->lock() : nullptr) return c10::Storage(std::move(last));
  const at::Tensor flat = elsewhere_->unpack();
  TORCH_INTERNAL_ASSERT(flat.storage_offset() == 0, "hooks gave a storage back in part");
  fetched_ = flat.storage().getWeakStorageImpl();
  return flat.storage();
}

}  // namespace zeropage::checkpointing::detail

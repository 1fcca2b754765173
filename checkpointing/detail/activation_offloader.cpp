#include "checkpointing/detail/activation_offloader.h"

#include <algorithm>
#include <utility>

#include "checkpointing/detail/offloaded_storage.h"

namespace zeropage::checkpointing::detail {

std::unique_ptr<PackedTensor> ActivationOffloader::pack(const at::Tensor& tensor) {
  if (!spans_.may_leave(tensor)) return keep(tensor);
  const auto span = span_of(tensor);
  const auto itemsize = static_cast<int64_t>(tensor.itemsize());
  const int64_t least_bytes = traffic_->options().least_bytes;
  if (!span || std::min(tensor.numel(), span->numel) * itemsize < least_bytes) return keep(tensor);
  std::shared_ptr<SavedStorage> storage = spans_.find(tensor, *span);
  if (!storage) storage = leave(tensor, *span);
  traffic_->note_saved_tensor();
  return pack_in(std::move(storage), tensor, "");
}

void ActivationOffloader::stay_here(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) spans_.stay_here(tensor);
}

std::shared_ptr<SavedStorage> ActivationOffloader::leave(const at::Tensor& tensor,
                                                         const Span& span) {
  auto storage = std::make_shared<OffloadedStorage>(traffic_, tensor, span);
  spans_.add(tensor, storage);
  traffic_->add(storage->place(), storage);
  return storage;
}

}  // namespace zeropage::checkpointing::detail

#include "checkpointing/detail/captured_tensors.h"

#include "zeropage/check.h"

namespace zeropage::checkpointing::detail {
namespace {

// Null for what has no memory of its own or no version: sparse and inference tensors, numbers.
const c10::StorageImpl* versioned_storage(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.is_inference()) return nullptr;
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return nullptr;
  return tensor.storage().unsafeGetStorageImpl();
}

}  // namespace

void CapturedTensors::leave_out(const at::Tensor& input) {
  if (const c10::StorageImpl* storage = versioned_storage(input)) inputs_.insert(storage);
}

void CapturedTensors::note(const at::Tensor& tensor) {
  const c10::StorageImpl* storage = versioned_storage(tensor);
  if (storage == nullptr || inputs_.contains(storage)) return;
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  noted_.try_emplace(storage, Noted{counter, counter.current_version()});
}

void CapturedTensors::check(const at::Tensor& tensor, const std::string& who) const {
  const c10::StorageImpl* storage = versioned_storage(tensor);
  if (storage == nullptr) return;
  const auto found = noted_.find(storage);
  if (found == noted_.end()) return;
  const auto& [counter, version] = found->second;
  ZP_CHECK(
      counter.current_version() == version, who, ": a tensor of sizes ", tensor.sizes(),
      " that its function captured, such as a parameter, was changed in place after the region "
      "(version ",
      version, " then, ", counter.current_version(),
      " now), so it cannot be repeated; run backward() before optimizer.step() or what else "
      "changes it, or capture a clone");
}

}  // namespace zeropage::checkpointing::detail

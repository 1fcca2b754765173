#include "checkpointing/detail/outside_writes.h"

#include <algorithm>

#include "checkpointing/detail/storage_bytes.h"
#include "operators/tensor_mark.h"
#include "zeropage/check.h"

namespace zeropage::checkpointing::detail {
void OutsideWrites::made(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.has_storage()) {
    made_.insert(tensor.storage().unsafeGetStorageImpl());
  }
}

bool OutsideWrites::has_made(const at::Tensor& tensor) const {
  return !tensor.has_storage() || made_.contains(tensor.storage().unsafeGetStorageImpl());
}

bool OutsideWrites::has_written(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return false;
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  return std::any_of(written_.begin(), written_.end(), [&](const Written& written) {
    return written.bytes.storage().unsafeGetStorageImpl() == storage;
  });
}

void OutsideWrites::before_write(const at::Tensor& tensor) {
  if (has_made(tensor) || has_written(tensor)) return;
  ZP_CHECK(!operators::may_be_paged(tensor), "a checkpointed forward writes in place to a ",
           "sharded parameter of sizes ", tensor.sizes(),
           ": it could not be repeated; write to it outside of the region");
  const at::NoGradGuard no_grad;
  at::Tensor bytes = bytes_of(tensor.storage());
  at::Tensor before = bytes.clone();
  written_.push_back({tensor.detach(), std::move(bytes), std::move(before)});
}

OutsideWritesScope::OutsideWritesScope(const OutsideWrites& writes) : writes_(writes) {
  const at::NoGradGuard no_grad;
  for (const auto& written : writes_.written_) {
    now_.push_back(written.bytes.clone());
    versions_.push_back(written.tensor.is_inference() ? 0 : written.tensor._version());
    written.bytes.copy_(written.before);
  }
}

OutsideWritesScope::~OutsideWritesScope() {
  const at::NoGradGuard no_grad;
  for (size_t index = 0; index < now_.size(); ++index) {
    const auto& written = writes_.written_[index];
    written.bytes.copy_(now_[index]);
    if (written.tensor.is_inference()) continue;
    c10::VariableVersion version = written.tensor.unsafeGetTensorImpl()->version_counter();
    version.set_version(versions_[index]);
  }
}

}  // namespace zeropage::checkpointing::detail

#include "zero/tiers/simulated_storage.h"

#include <algorithm>

#include "base/exact.h"
#include "memory/meta_memory.h"
#include "zero/tiers/nvme_storage.h"

namespace zeropage::zero {

at::Tensor SimulatedStorage::add(size_t page, int64_t numel, at::ScalarType dtype,
                                 double /*initial*/, memory::Kind kind) {
  const std::lock_guard lock(mutex_);
  at::Tensor added = memory::meta_tensor_in(tier_, numel, dtype, kind);
  record_bytes_[page] +=
      base::round_up(static_cast<int64_t>(added.nbytes()), NvmeStorage::kPieceAlignment);
  return added;
}

void SimulatedStorage::fetch(size_t /*page*/) {
  if (stays()) return;
  const std::lock_guard lock(mutex_);
  if (buffers_.defined() || record_bytes_.empty()) return;
  const auto largest = std::max_element(
      record_bytes_.begin(), record_bytes_.end(),
      [](const auto& left, const auto& right) { return left.second < right.second; });
  buffers_ = memory::meta_tensor_in(memory::Tier::kHost, NvmeStorage::kBuffers * largest->second,
                                    at::kByte, memory::Kind::kStaging);
}

int64_t SimulatedStorage::buffer_bytes() const {
  const std::lock_guard lock(mutex_);
  return buffers_.defined() ? static_cast<int64_t>(buffers_.nbytes()) : 0;
}

}  // namespace zeropage::zero

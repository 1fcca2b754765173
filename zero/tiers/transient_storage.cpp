#include "zero/tiers/transient_storage.h"

#include <algorithm>

#include <ATen/ops/empty.h>

#include "memory/storage.h"
#include "zeropage/check.h"

namespace zeropage::zero {

at::Tensor TransientStorage::add(size_t page, int64_t numel, at::ScalarType dtype,
                                 double /*initial*/, memory::Kind kind) {
  const std::lock_guard lock(mutex_);
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  Entry& entry = entries_[page];
  // Tensors that nobody has any more.
  std::erase_if(entry.storages,
                [](const c10::Storage& storage) { return storage.use_count() == 1; });
  TORCH_INTERNAL_ASSERT(entry.storages.empty() || entry.bytes == bytes,
                        "tensors of a page share their memory here");
  entry.bytes = bytes;
  entry.kind = kind;
  entry.storages.push_back(memory::storage_without_memory(bytes, device_));
  if (entry.buffer.defined()) give_memory(entry);
  const at::Tensor like = at::empty({0}, at::TensorOptions(c10::kMeta).dtype(dtype));
  like.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return memory::tensor_in(entry.storages.back(), like, /*offset=*/0, dtype);
}

at::Tensor TransientStorage::take_buffer() {
  int64_t largest = 0;
  for (const auto& [page, entry] : entries_) largest = std::max(largest, entry.bytes);
  if (largest > buffer_bytes_) {
    // Those that are in use are let go when their pages are dropped.
    idle_.clear();
    buffers_ = 0;
    buffer_bytes_ = largest;
  }
  const auto make = [&] {
    ++buffers_;
    return memory_->add(/*page=*/0, buffer_bytes_, at::kByte, 0, entries_.begin()->second.kind);
  };
  if (buffers_ == 0) {
    const size_t wanted = std::min(kBuffers, entries_.size());
    while (buffers_ < wanted) idle_.push_back(make());
  }
  if (idle_.empty()) return make();
  at::Tensor buffer = std::move(idle_.back());
  idle_.pop_back();
  return buffer;
}

void TransientStorage::give_memory(const Entry& entry) {
  if (entry.buffer.is_meta()) return;
  const at::Tensor flat = entry.buffer.narrow(0, 0, entry.bytes);
  for (const c10::Storage& storage : entry.storages) {
    memory::give_memory(*storage.unsafeGetStorageImpl(), flat);
  }
}

void TransientStorage::begin_writing(size_t page) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_.at(page);
  if (entry.buffer.defined()) return;
  entry.buffer = take_buffer();
  give_memory(entry);
}

void TransientStorage::drop(size_t page) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_.at(page);
  if (!entry.buffer.defined()) return;
  if (!entry.buffer.is_meta()) {
    for (const c10::Storage& storage : entry.storages) {
      memory::drop_memory(*storage.unsafeGetStorageImpl());
    }
  }
  const at::Tensor buffer = std::exchange(entry.buffer, {});
  if (buffer.numel() < buffer_bytes_) return;
  if (idle_.size() >= kBuffers) {
    --buffers_;
    return;
  }
  idle_.push_back(buffer);
}

bool TransientStorage::has_values(size_t page) const {
  const std::lock_guard lock(mutex_);
  return entries_.at(page).buffer.defined();
}

void TransientStorage::fetch(size_t page) {
  ZP_CHECK(has_values(page),
           "p.grad(): its gradient was freed as soon as backward had updated its page "
           "(options.offload.step is StepWhen::kInBackward); call zero_grad() before the next "
           "backward(), and not zero_grad(false), which would write zeros to it, use an "
           "Accumulator, which reports the norm, or read gradients with "
           "StepWhen::kInStep");
}

}  // namespace zeropage::zero

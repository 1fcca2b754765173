// Host memory that a device copies to and from without the host's help.
//
// One buffer, grown to the largest use. Its bytes are charged by hand, as kStaging: page-locked
// memory does not come from the allocator that the ledger wraps.
//
// Threads: one at a time.
#pragma once

#include <memory>

#include <ATen/Context.h>
#include <ATen/core/TensorBody.h>
#include <ATen/ops/from_blob.h>

#include "memory/ledger.h"

namespace zeropage::comm::detail {

class StagingBuffer {
 public:
  // Charges the calling thread's ledger.
  explicit StagingBuffer(c10::DeviceType device) : device_(device) {}
  ~StagingBuffer() { release(); }
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;

  int64_t bytes() const { return bytes_; }

  // [numel], on the host, until the next call. REQUIRES: nothing uses what the last call gave.
  at::Tensor take(int64_t numel, at::ScalarType dtype) {
    const int64_t needed = numel * static_cast<int64_t>(c10::elementSize(dtype));
    if (needed > bytes_) {
      release();
      data_ = at::globalContext().getPinnedMemoryAllocator(device_)->allocate(
          static_cast<size_t>(needed));
      bytes_ = needed;
      ledger_->charge(memory::Kind::kStaging, bytes_);
    }
    return at::from_blob(data_.get(), {numel}, at::TensorOptions().dtype(dtype));
  }

 private:
  void release() {
    data_.clear();
    ledger_->discharge(memory::Kind::kStaging, std::exchange(bytes_, 0));
  }

  // Constant after construction.
  const c10::DeviceType device_;
  const std::shared_ptr<memory::Ledger> ledger_ = memory::Ledger::current();

  c10::DataPtr data_;
  int64_t bytes_ = 0;
};

}  // namespace zeropage::comm::detail

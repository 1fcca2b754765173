// Host memory that a device copies to and from without the host's help, and that other ranks may read.
//
// One buffer, grown to the largest use: a memory::PinnedArena. On CUDA that is ordinary memory which is
// registered with the driver, since what cudaHostAlloc() maps may be closed to process_vm_readv().
// Its bytes are charged by hand, as kStaging: an arena is on no ledger.
//
// Threads: one at a time.
#pragma once

#include <memory>
#include <utility>

#include <ATen/core/TensorBody.h>
#include <ATen/ops/empty.h>

#include "device/pinned_arena.h"
#include "zeropage/ledger.h"

namespace zeropage::comm::detail {

class StagingBuffer {
 public:
  // device: with its index. Charges the calling thread's ledger.
  explicit StagingBuffer(c10::Device device) : device_(device) {}
  ~StagingBuffer() { release(); }
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;

  int64_t bytes() const { return bytes_; }

  // [numel], on the host, until the next call. REQUIRES: nothing uses what the last call gave.
  at::Tensor take(int64_t numel, at::ScalarType dtype) {
    const int64_t needed = numel * static_cast<int64_t>(c10::elementSize(dtype));
    if (needed > bytes_) {
      release();
      const device::Take all{needed, at::kByte};
      device::PinnedArena arena(device::PinnedArena::bytes_for({&all, 1}), {.device = device_});
      memory_ = arena.take(needed, at::kByte);
      ledger_->charge(memory::Kind::kStaging, needed);
      bytes_ = needed;
    }
    if (needed == 0) return at::empty({0}, at::TensorOptions().dtype(dtype));
    return memory_.narrow(0, 0, needed).view(dtype);
  }

 private:
  void release() {
    memory_ = at::Tensor();
    ledger_->discharge(memory::Kind::kStaging, std::exchange(bytes_, 0));
  }

  // Constant after construction.
  const c10::Device device_;
  const std::shared_ptr<memory::Ledger> ledger_ = memory::Ledger::current();

  at::Tensor memory_;  // [bytes_]
  int64_t bytes_ = 0;
};

}  // namespace zeropage::comm::detail

// A copy of activations away from the device: in host memory, or in a store.
//
// Lifetime: owns its host memory, or its place in the store.
// Threads: guarded by its OffloadedStorage's mutex.
// Throws: what the store throws; it never gives other bytes.
#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "checkpointing/detail/compression.h"
#include "zeropage/activation_offload.h"
#include "zeropage/detail/pending.h"
#include "zeropage/ledger.h"

namespace zeropage::checkpointing::detail {

class HostCopy {
 public:
  // store: null if it stays on the host. device: whose copies read and write its host memory.
  HostCopy(std::shared_ptr<memory::Ledger> ledger, std::shared_ptr<ActivationStore> store,
           Encoded form, c10::Device device);

  const Encoded& form() const { return form_; }
  // Host memory for it, which is to be filled: [numel]
  const at::Tensor& allocate();

  // It is filled: goes on to the store, if there is one and it has not gone already.
  void go_to_store();
  // Starts to read it from the store, unless it is here or on its way.
  void read_ahead();
  // Whether nothing is being read.
  bool is_read() const { return !reading_ || reading_->done(); }
  // Waits until it is here. [numel]
  const at::Tensor& values();
  // Lets its host memory go, if the store has it. REQUIRES: it is not being read.
  void let_go();
  // What is being read is not needed. It goes when it has been.
  void stop_reading();

 private:
  at::Tensor host_bytes(int64_t bytes, int64_t alignment) const;
  void free_memory();

  // Constant after construction.
  const std::shared_ptr<memory::Ledger> ledger_;
  const std::shared_ptr<ActivationStore> store_;
  const Encoded form_;
  const c10::Device device_;

  at::Tensor values_;  // [numel], until it is stored, and when it was read again
  at::Tensor bytes_;   // uint8: all of their memory, as long and as aligned as the store wants it
  std::unique_ptr<StoredActivation> stored_;
  std::optional<memory::Pending> reading_;  // from the store
};

}  // namespace zeropage::checkpointing::detail

// What pages would keep on the host or on NVMe, in a simulated world: tensors on the meta device,
// charged to the ledger's account of the tier.
//
// On NVMe a page's tensors are one record (zero/tiers/nvme_storage). From the first use on, the
// buffers through which records pass are charged as staging of the host.
// Threads: any, but for add().
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>

#include "zero/tiers/tier_storage.h"

namespace zeropage::zero {

class SimulatedStorage final : public TierStorage {
 public:
  // tier: where; kDevice: nothing will be added.
  explicit SimulatedStorage(memory::Tier tier) : tier_(tier) {}

  at::Tensor add(size_t page, int64_t numel, at::ScalarType dtype, double initial,
                 memory::Kind kind) override;
  void fetch(size_t page) override;
  bool stays() const override { return tier_ != memory::Tier::kNvme; }
  int64_t buffer_bytes() const override;

 private:
  const memory::Tier tier_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::map<size_t, int64_t> record_bytes_;  // by page
  at::Tensor buffers_;                      // undefined before the first use
};

}  // namespace zeropage::zero

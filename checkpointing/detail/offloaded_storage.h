// A span of a storage that has left for the host, and from there, if there is one, for a store.
//
// Lifetime: owns its copy, and shares the traffic.
// Threads: as SavedStorage.
#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "checkpointing/detail/host_copy.h"
#include "checkpointing/detail/offload_traffic.h"
#include "checkpointing/detail/saved_storage.h"

namespace zeropage::checkpointing::detail {

class OffloadedStorage final : public SavedStorage, public OffloadedCopy {
 public:
  // Starts the copy out.
  OffloadedStorage(std::shared_ptr<OffloadTraffic> traffic, const at::Tensor& tensor,
                   const Span& span);
  ~OffloadedStorage() override;

  int64_t place() const { return place_; }
  void go_to_store() override;
  bool fetch_ahead() override;
  void drop_ahead() override;

 private:
  at::Tensor fetch() override;
  void after_unpack() override;

  void copy_out(const at::Tensor& flat);
  void let_go_ahead();
  at::Tensor start_fetch();  // [numel], there at arrived_
  // Where the program still holds it, else undefined.
  at::Tensor source() const;
  bool has_streams() const { return device::has_streams(options().device().type()); }

  // Constant after construction.
  const std::shared_ptr<OffloadTraffic> traffic_;
  const CopyStreams streams_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> source_;
  device::Event copied_;

  // Guarded by mutex_.
  HostCopy copy_;
  const int64_t place_;  // in the order in which copies began; constant
  bool was_fetched_ = false;
  bool counts_ahead_ = false;
  at::Tensor ahead_;
  device::Event arrived_;
};

}  // namespace zeropage::checkpointing::detail

// A span of a storage that has left for the host, and from there, if there is one, for a store.
//
// Lifetime: owns its host memory or its place in the store, and a share of the Offloader.
// Threads: as SavedStorage.
#pragma once

#include <memory>
#include <optional>

#include "checkpointing/detail/compression.h"
#include "checkpointing/detail/offloader.h"
#include "checkpointing/detail/saved_storage.h"
#include "memory/charged_block.h"

namespace zeropage::checkpointing::detail {

// Host memory for a copy: its values, and all of it, as long and as aligned as the store wants it.
struct HostBlock {
  at::Tensor values;  // [numel]
  at::Tensor bytes;   // uint8
};

class OffloadedStorage final : public SavedStorage {
 public:
  // Starts the copy out.
  OffloadedStorage(std::shared_ptr<Offloader> offloader, const at::Tensor& tensor,
                   const Span& span);
  ~OffloadedStorage() override;

  int64_t place() const { return place_; }
  // The copy has ended: it need not stay on the host. Returns at once if it has gone on already.
  void go_to_store();
  // Starts the copy back, unless it is back already, or need not come: from the store to the host, and
  // when it is there, at a later call, to the device. False if there is no room.
  bool fetch_ahead();
  // Gives up what was fetched ahead.
  void drop_ahead();

 private:
  at::Tensor fetch() override;
  void after_unpack() override;

  void copy_out(const at::Tensor& flat);
  HostBlock host_memory() const;
  void read_ahead();
  void let_go_ahead();
  const HostBlock& host_copy();
  at::Tensor start_fetch();  // [numel], there at arrived_
  // Where the program still holds it, else undefined.
  at::Tensor source() const;
  bool has_streams() const { return memory::has_streams(options().device().type()); }

  // Constant after construction.
  const std::shared_ptr<Offloader> offloader_;
  const Encoded form_;
  const CopyStreams streams_;
  const int64_t place_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> source_;
  memory::Event copied_;

  // Guarded by mutex_.
  HostBlock copy_;  // until it is stored, and when it was read again
  std::unique_ptr<StoredActivation> stored_;
  std::optional<memory::Pending> reading_;  // from the store into copy_
  bool was_fetched_ = false;
  bool counts_ahead_ = false;
  at::Tensor ahead_;
  memory::Event arrived_;
};

}  // namespace zeropage::checkpointing::detail

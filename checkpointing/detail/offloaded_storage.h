// A span of a storage that has left for the host.
//
// Lifetime: owns its host memory and a share of the Offloader.
// Threads: as SavedStorage.
#pragma once

#include <memory>

#include "checkpointing/detail/compression.h"
#include "checkpointing/detail/offloader.h"
#include "checkpointing/detail/saved_storage.h"
#include "memory/charged_block.h"

namespace zeropage::checkpointing::detail {

class OffloadedStorage final : public SavedStorage {
 public:
  // Starts the copy out.
  OffloadedStorage(std::shared_ptr<Offloader> offloader, const at::Tensor& tensor,
                   const Span& span);
  ~OffloadedStorage() override;

  int64_t place() const { return place_; }
  // Starts the copy back, unless it is back already, or need not come. False if there is no room.
  bool fetch_ahead();
  // Gives up what was fetched ahead.
  void drop_ahead();

 private:
  at::Tensor fetch() override;
  void after_unpack() override;

  void copy_out(const at::Tensor& flat);
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
  at::Tensor copy_;  // on the host
  memory::Event copied_;

  // Guarded by mutex_.
  at::Tensor ahead_;
  memory::Event arrived_;
};

}  // namespace zeropage::checkpointing::detail

// The hooks behind ActivationOffload: what leaves, the order in which it left, and how much is on
// its way; and what has left, which asks the hooks for its place in the order.
//
// Lifetime: graphs own it, through their OffloadedStorages.
// Threads: any. Locks are taken in this order: a storage's, the ActivationOffloader's.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "checkpointing/activation_offload_options.h"
#include "checkpointing/detail/compression.h"
#include "checkpointing/detail/saved_storage.h"
#include "checkpointing/saved_tensors.h"
#include "memory/charged_block.h"
#include "memory/ledger.h"

namespace zeropage::checkpointing::detail {

class OffloadedStorage;

// The streams that copies of one device run on.
struct CopyStreams {
  explicit CopyStreams(c10::Device device);
  memory::Stream out;
  memory::Stream back;
};

class ActivationOffloader final : public SavedTensorHooks,
                                  public std::enable_shared_from_this<ActivationOffloader> {
 public:
  explicit ActivationOffloader(const ActivationOffloadOptions& options);

  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override;
  void stay_here(const std::vector<at::Tensor>& tensors);
  ActivationOffloadStatistics statistics() const;

  // For OffloadedStorage:

  Compression compression() const { return options_.compression; }
  // Null: copies stay on the host.
  const std::shared_ptr<ActivationStore>& store() const { return options_.store; }
  const std::shared_ptr<memory::Ledger>& ledger() const { return ledger_; }
  CopyStreams streams(c10::Device device);

  // A copy of host_bytes is to begin. Returns its place in the order.
  int64_t note_copy(int64_t host_bytes);
  // The copy is not needed any more. If it is still on its way out, its source goes now: what it
  // then reads, nobody does.
  void forget_copy(int64_t place, int64_t host_bytes);
  // Waits until `bytes` more may be on their way out.
  void wait_to_leave(int64_t bytes);
  // They are until `end`. buffers: what the copy reads and writes.
  void note_leaving(int64_t place, memory::Event end, int64_t bytes,
                    std::vector<at::Tensor> buffers);

  // Whether `bytes` more may be fetched ahead; if so, they count until let_go_ahead().
  bool take_ahead(int64_t place, int64_t bytes);
  void let_go_ahead(int64_t place);
  void note_fetch(int64_t bytes, bool was_ahead);
  // Starts to bring back what left before it.
  void fetch_before(int64_t place);

 private:
  using Storages = std::vector<std::shared_ptr<OffloadedStorage>>;
  struct Leaving {
    int64_t place;
    memory::Event end;
    int64_t bytes;
    std::vector<at::Tensor> buffers;
  };

  std::shared_ptr<OffloadedStorage> leave(const at::Tensor& tensor, const Span& span);
  Storages let_go_what_has_left();  // those whose copies have ended since
  void go_to_store(const Storages& storages);
  void drop_what_was_passed_by(int64_t place);
  int64_t staging_bytes() const;  // under mutex_

  // Constant after construction.
  const ActivationOffloadOptions options_;
  const std::shared_ptr<memory::Ledger> ledger_ = memory::Ledger::current();

  SavedSpans spans_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::map<c10::Device, CopyStreams, bool (*)(c10::Device, c10::Device)> streams_;
  std::map<int64_t, std::weak_ptr<OffloadedStorage>> order_;  // by place
  int64_t next_place_ = 0;
  std::deque<Leaving> leaving_;
  int64_t leaving_bytes_ = 0;
  std::map<int64_t, int64_t> ahead_;  // place -> bytes
  int64_t ahead_bytes_ = 0;
  int64_t largest_bytes_ = 0;
  ActivationOffloadStatistics statistics_;
};

// Host memory for a copy: its values, and all of it, as long and as aligned as the store wants it.
struct HostBlock {
  at::Tensor values;  // [numel]
  at::Tensor bytes;   // uint8
};

// A span of a storage that has left for the host, and from there, if there is one, for a store.
//
// Lifetime: owns its host memory or its place in the store, and a share of the ActivationOffloader.
// Threads: as SavedStorage.
class OffloadedStorage final : public SavedStorage {
 public:
  // Starts the copy out.
  OffloadedStorage(std::shared_ptr<ActivationOffloader> offloader, const at::Tensor& tensor,
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
  const std::shared_ptr<ActivationOffloader> offloader_;
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

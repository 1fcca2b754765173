// The hooks behind ActivationOffload: what leaves, the order in which it left, and how much is on
// its way.
//
// Lifetime: graphs own it, through their OffloadedStorages.
// Threads: any. Locks are taken in this order: a storage's, the Offloader's.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "checkpointing/activation_offload.h"
#include "checkpointing/detail/saved_storage.h"
#include "memory/ledger.h"

namespace zeropage::checkpointing::detail {

class OffloadedStorage;

// The streams that copies of one device run on.
struct CopyStreams {
  explicit CopyStreams(c10::Device device);
  memory::Stream out;
  memory::Stream back;
};

class Offloader final : public SavedTensorHooks, public std::enable_shared_from_this<Offloader> {
 public:
  explicit Offloader(const OffloadOptions& options);

  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override;
  void stay_here(const std::vector<at::Tensor>& tensors);
  OffloadStatistics statistics() const;

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
  const OffloadOptions options_;
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
  OffloadStatistics statistics_;
};

}  // namespace zeropage::checkpointing::detail

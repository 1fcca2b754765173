// The traffic of offloaded activations: the order in which they left, and how much is on its way.
//
// Lifetime: shared by what has left (OffloadedCopy), which asks for its place in the order.
// Threads: any. Locks are taken in this order: a copy's, the traffic's.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "checkpointing/detail/leaving_copies.h"
#include "device/stream.h"
#include "zeropage/activation_offload.h"
#include "zeropage/ledger.h"

namespace zeropage::checkpointing::detail {

// The streams that copies of one device run on.
struct CopyStreams {
  explicit CopyStreams(c10::Device device);
  device::Stream out;
  device::Stream back;
};

// What has left, as the traffic moves it.
class OffloadedCopy {
 public:
  virtual ~OffloadedCopy() = default;
  // The copy has ended: it need not stay on the host. Returns at once if it has gone on already.
  virtual void go_to_store() = 0;
  // Starts the copy back, unless it is back already, or need not come: from the store to the host, and
  // when it is there, at a later call, to the device. False if there is no room.
  virtual bool fetch_ahead() = 0;
  // Gives up what was fetched ahead.
  virtual void drop_ahead() = 0;
};

class OffloadTraffic {
 public:
  explicit OffloadTraffic(const ActivationOffloadOptions& options);

  const ActivationOffloadOptions& options() const { return options_; }
  const std::shared_ptr<memory::Ledger>& ledger() const { return ledger_; }
  CopyStreams streams(c10::Device device);

  void note_saved_tensor();
  // The copy of that place has left, and may be moved.
  void add(int64_t place, const std::shared_ptr<OffloadedCopy>& copy);

  // A copy of host_bytes is to begin. Returns its place in the order.
  int64_t note_copy(int64_t host_bytes);
  // The copy is not needed any more. If it is still on its way out, its source goes now: what it
  // then reads, nobody does.
  void forget_copy(int64_t place, int64_t host_bytes);
  // Waits until `bytes` more may be on their way out.
  void wait_to_leave(int64_t bytes);
  // They are until `end`. buffers: what the copy reads and writes.
  void note_leaving(int64_t place, device::Event end, int64_t bytes,
                    std::vector<at::Tensor> buffers);

  // Whether `bytes` more may be fetched ahead; if so, they count until let_go_ahead().
  bool take_ahead(int64_t place, int64_t bytes);
  void let_go_ahead(int64_t place);
  void note_fetch(int64_t bytes, bool was_ahead);
  // Starts to bring back what left before it.
  void fetch_before(int64_t place);

  ActivationOffloadStatistics statistics() const;

 private:
  using Copies = std::vector<std::shared_ptr<OffloadedCopy>>;

  Copies let_go_what_has_left();  // those whose copies have ended since
  void go_to_store(const Copies& copies);
  void drop_what_was_passed_by(int64_t place);
  int64_t staging_bytes() const;  // under mutex_

  // Constant after construction.
  const ActivationOffloadOptions options_;
  const std::shared_ptr<memory::Ledger> ledger_ = memory::Ledger::current();

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::map<c10::Device, CopyStreams, bool (*)(c10::Device, c10::Device)> streams_;
  std::map<int64_t, std::weak_ptr<OffloadedCopy>> order_;  // by place
  int64_t next_place_ = 0;
  LeavingCopies leaving_;
  std::map<int64_t, int64_t> ahead_;  // place -> bytes
  int64_t ahead_bytes_ = 0;
  int64_t largest_bytes_ = 0;
  ActivationOffloadStatistics statistics_;
};

}  // namespace zeropage::checkpointing::detail

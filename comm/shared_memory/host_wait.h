// How a rank waits for others of its host: a few microseconds awake, then asleep on a futex, as ranks may
// be more than cores. A sleeper looks around ten times a second for peers that ended, left or failed.
//
// Lifetime: what it is given must outlive it. Threads: one waits at a time; abort() may come from another.
// Errors: PeerError for a peer that ended, left, did not come within the deadline where that ends
// operations, or is out of step.
#pragma once

#include <atomic>
#include <chrono>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "comm/shared_memory/futex.h"
#include "comm/shared_memory/host_peers.h"
#include "comm/shared_memory/host_segment.h"

namespace zeropage::comm::detail {

class HostWait {
 public:
  using Moment = std::chrono::steady_clock::time_point;

  // ends_at_deadline: whether a wait ends there; if not, its owner ends it by abort().
  HostWait(const HostSegment& segment, const HostPeers& peers, std::chrono::milliseconds deadline,
           bool ends_at_deadline)
      : segment_(segment),
        peers_(peers),
        deadline_(deadline),
        ends_at_deadline_(ends_at_deadline) {}

  // The deadline of an operation that begins now.
  Moment give_up_at() const { return std::chrono::steady_clock::now() + deadline_; }
  // Sleeps until `ready`, which changes with `word`. awaited: places that have to do something yet.
  void until(const FutexWord& word, c10::function_ref<bool()> ready,
             c10::function_ref<std::vector<int>()> awaited, Moment give_up_at);
  // Ends what waits, and all later waits, with an error. For destruction.
  void abort();

 private:
  void look_around(const std::vector<int>& awaited, Moment give_up_at) const;
  void look_for_ranks_out_of_step() const;

  // Constant after construction.
  const HostSegment& segment_;
  const HostPeers& peers_;
  const std::chrono::milliseconds deadline_;
  const bool ends_at_deadline_;

  std::atomic<bool> aborted_{false};
};

}  // namespace zeropage::comm::detail

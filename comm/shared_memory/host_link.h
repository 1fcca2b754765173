// The ranks of one host, meeting in shared memory.
//
// Ranks go through the same collectives in the same order. A collective is a Session: a rank
// announces it, and the ranks meet one or more times. Before a meeting a rank may write to its slot;
// after it, it may read the slots that the others wrote before it, until it comes to the next but
// one. Between two meetings of a session it may also read the others' tensors. So a small tensor
// costs one meeting and two copies, a large one two meetings and a single copy.
//
// Threads: one at a time; abort() and fail() may come from another.
// Errors: PeerError, as comm/shared_memory/host_wait.h; all ranks get one where one is out of step.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "comm/detail/call.h"
#include "comm/shared_memory/host_pairs.h"
#include "comm/shared_memory/host_peers.h"
#include "comm/shared_memory/host_segment.h"
#include "comm/shared_memory/host_wait.h"
#include "comm/watch/failure_reason.h"

namespace zeropage::comm::detail {

class HostLink {
 public:
  static constexpr int64_t kSlotBytes = HostSegment::kSlotBytes;

  struct Options {
    HostPeers::Options peers;
    std::chrono::milliseconds deadline;
    // Whether an operation ends at the deadline; if not, its owner ends it by abort().
    bool ends_at_deadline = true;
  };

  // The segment that the host's first rank makes for so many ranks.
  static size_t segment_bytes(size_t ranks) { return HostSegment::bytes_for(ranks); }
  // Writes this rank's place in the segment. The others find it, by peers(), after the caller has let all
  // come.
  HostLink(SharedSegment segment, const Options& options);
  ~HostLink();
  HostLink(const HostLink&) = delete;
  HostLink& operator=(const HostLink&) = delete;

  HostPeers& peers() { return peers_; }
  const HostPeers& peers() const { return peers_; }
  HostPairs& pairs() { return pairs_; }
  int64_t bytes() const { return segment_.bytes(); }

  // What must be the same on all ranks beside the call itself.
  struct Details {
    ReduceOp op = ReduceOp::kSum;
    at::ScalarType dtype = at::kByte;
    int root = -1;
  };

  class Session {
   public:
    // address: of this rank's tensor, for the others to read.
    Session(HostLink& link, const Call& call, const Details& details, const void* address);

    std::byte* own_slot();  // to write to before the next meeting
    void meet();
    // What was written before the last meeting.
    const std::byte* slot(int place) const;
    // Copies from `offset` of the tensor of that rank.
    void read(int place, int64_t offset, void* into, int64_t bytes) const;

   private:
    void check_announcements() const;

    HostLink& link_;
    const HostWait::Moment give_up_at_;
    const uint64_t number_;
    bool met_ = false;
  };

  // Leaves this rank's account for the others, who end with it; the first that it has.
  void fail(const FailureReason& account);
  // Ends what waits, and all later waits, with an error. For destruction.
  void abort() { wait_.abort(); }

 private:
  void meet(HostWait::Moment give_up_at);

  const HostSegment segment_;
  HostPeers peers_;
  HostWait wait_;
  HostPairs pairs_;
  uint64_t sessions_ = 0;
  uint64_t rounds_ = 0;  // meetings so far
  std::mutex failing_;
};

}  // namespace zeropage::comm::detail

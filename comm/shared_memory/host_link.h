// The ranks of one host, meeting in shared memory.
//
// Ranks go through the same collectives in the same order. A collective is a Session: a rank
// announces it, and the ranks meet one or more times. Before a meeting a rank may write to its slot;
// after it, it may read the slots that the others wrote before it, until it comes to the next but
// one. Between two meetings of a session it may also read the others' tensors. So a small tensor
// costs one meeting and two copies, a large one two meetings and a single copy.
//
// Waiting: a few microseconds awake, then asleep on a futex: ranks may be more than cores. A sleeper
// looks around ten times a second for peers that ended, left or failed.
//
// Pairs of ranks exchange messages apart from the collectives (send, recv).
//
// Threads: one at a time; abort() and fail() may come from another.
// Errors: PeerError for a peer that ended, left, did not come within the deadline where that ends
// operations, or is out of step (all ranks then get one).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/detail/account.h"
#include "comm/detail/call.h"
#include "comm/detail/peer_error.h"
#include "comm/shared_memory/futex.h"
#include "comm/shared_memory/host_segment.h"
#include "comm/shared_memory/memory_access.h"
#include "comm/shared_memory/peer_process.h"

namespace zeropage::comm::detail {

class HostLink {
 public:
  static constexpr int64_t kSlotBytes = HostSegment::kSlotBytes;

  struct Options {
    std::vector<int> ranks;  // of this host, in the order that all of them use
    int own = 0;             // this rank's place among them
    std::chrono::milliseconds deadline;
    // Whether an operation ends at the deadline; if not, its owner ends it by abort().
    bool ends_at_deadline = true;
    // Of the kind of memory that this rank's tensors will be in: the others try to read it. Written by
    // the constructor; must live until all ranks have found their peers. Null: memory of this process
    // like any other.
    uint64_t* sample = nullptr;
    RankNames names;  // of all ranks, for words
  };

  // The segment that the host's first rank makes for so many ranks.
  static size_t segment_bytes(size_t ranks) { return HostSegment::bytes_for(ranks); }
  // Writes this rank's place in the segment. The others find it after the caller has let all come.
  HostLink(SharedSegment segment, const Options& options);
  // REQUIRES: all ranks have constructed theirs. Whether the kernel lets this rank read the others'
  // memory; "" or why not.
  std::string find_peers();
  // all_can: the same on all ranks. False, as at first: tensors pass through slots.
  void use_peer_memory(bool all_can);
  ~HostLink();

  int size() const { return static_cast<int>(options_.ranks.size()); }
  int own() const { return options_.own; }
  int rank_of(int place) const { return options_.ranks[static_cast<size_t>(place)]; }
  int name_of(int place) const { return options_.names[rank_of(place)]; }
  const RankNames& names() const { return options_.names; }
  bool reads_peers() const { return reads_peers_; }
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
    // As written before the last meeting.
    const std::byte* slot(int place) const;
    // Copies from `offset` of the tensor of that rank.
    void read(int place, int64_t offset, void* into, int64_t bytes) const;

   private:
    void check_announcements() const;

    HostLink& link_;
    const std::chrono::steady_clock::time_point give_up_at_;
    const uint64_t number_;
    bool met_ = false;
  };

  void send(int place, const Call& call, const void* data);
  void receive(int place, const Call& call, void* data);

  // The ranks that left, ended with an error, or whose process has ended.
  std::vector<int> lost_ranks() const;
  // What is known of a rank's process, "; its process 7 is running"; "" for one of another host.
  std::string state_of(int rank) const;
  // Leaves this rank's account for the others, who end with it; the first that it has. From any thread.
  void fail(const Account& account);
  // Ends what waits, and all later waits, with an error. For destruction.
  void abort();

 private:
  using Moment = std::chrono::steady_clock::time_point;

  HostSegment::Header& header() const { return segment_.header(); }
  HostSegment::Board& board(int place) const { return segment_.board(place); }
  HostSegment::Lane& lane(int from, int to) const { return segment_.lane(from, to); }

  void meet(Moment give_up_at);
  // Sleeps until `ready`, which changes with `word`. awaited: places that have to do something yet.
  template <typename Ready, typename Awaited>
  void wait(const FutexWord& word, Ready ready, Awaited awaited, Moment give_up_at);
  void look_around(const std::vector<int>& awaited, Moment give_up_at) const;
  void look_for_ranks_out_of_step() const;
  class PairScope;

  const HostSegment segment_;
  const Options options_;
  std::vector<PeerProcess> peers_;  // by place
  uint64_t cookie_ = 0;
  bool reads_peers_ = false;
  std::optional<SiblingsMayRead> siblings_may_read_;
  uint64_t sessions_ = 0;
  uint64_t rounds_ = 0;  // meetings so far
  std::atomic<bool> aborted_{false};
  std::mutex failing_;
};

}  // namespace zeropage::comm::detail

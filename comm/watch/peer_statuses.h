// The last status of each other rank, and when it changed.
//
// Threads: one at a time, the watch's.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/detail/rank_names.h"
#include "comm/watch/activity.h"
#include "comm/watch/rank_status.h"

namespace zeropage::comm::detail {

class PeerStatuses {
 public:
  using Clock = std::chrono::steady_clock;

  // deadline: a rank whose heartbeat has not changed for half of it is called silent.
  PeerStatuses(int rank, int size, std::chrono::milliseconds deadline, RankNames names)
      : rank_(rank),
        deadline_(deadline),
        names_(std::move(names)),
        statuses_(static_cast<size_t>(size)) {}

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(statuses_.size()); }
  const RankNames& names() const { return names_; }

  // Sets what this rank has called when it begins to read statuses. If a wait has begun since the last time,
  // statuses in the store may be old.
  void set_own_calls(const CallHistory& ours) { ours_ = ours; }
  void listen(int other, const std::string& text);
  void note_store_answer() { store_answered_at_ = Clock::now(); }

  // Its last status; nothing if it has written none.
  const std::optional<RankStatus>& status(int other) const { return of(other).status; }
  // When its heartbeat last changed; unset: not since its first status.
  Clock::time_point last_heartbeat_at(int other) const { return of(other).at; }
  Clock::time_point store_answered_at() const { return store_answered_at_; }
  // Whether its heartbeat has changed since the wait began.
  bool has_heartbeat(int other) const;
  // Whether it has written the reason of a failure since the wait began, with or without a heartbeat.
  bool has_failed(int other) const;
  // Whether all ranks that wait now are about to end.
  bool all_will_end() const;

  // "Rank 1 stands at all_gather #12 of ..."
  std::string describe(int other) const;
  std::string describe_others() const;

 private:
  struct PeerStatus {
    std::optional<RankStatus> status;
    uint64_t period = 0;  // during which it was heard first
    uint64_t first_heartbeat = 0;
    Clock::time_point at;
  };

  const PeerStatus& of(int other) const { return statuses_[static_cast<size_t>(other)]; }

  // Constant after construction.
  const int rank_;
  const std::chrono::milliseconds deadline_;
  const RankNames names_;

  CallHistory ours_;
  Clock::time_point store_answered_at_ = Clock::now();
  std::vector<PeerStatus> statuses_;  // by rank
};

// "1.5 s"
std::string tenths_of_seconds(std::chrono::steady_clock::duration time);

}  // namespace zeropage::comm::detail

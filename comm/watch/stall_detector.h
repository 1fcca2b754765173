// Decides whether a wait for other ranks can end, and which rank is the cause if it cannot. Reports on stderr for
// which rank this one waits long.
//
// Lifetime: the roll must outlive it. Threads: one at a time, the watch's.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/watch/peer_statuses.h"
#include "comm/watch/wait.h"
#include "comm/watch/wait_limits.h"

namespace zeropage::comm::detail {

class StallDetector {
 public:
  // Facts from other sources than the ranks' statuses. All may be empty.
  struct Facts {
    std::vector<std::string> hosts;  // by rank
    // Says the state of a rank's process, such as "; its process 7 is stopped".
    std::function<std::string(int rank)> state_of;
    bool broadcasts_wait = false;  // a broadcast does not end without every rank
  };

  // store_server: the rank whose process serves the store; -1: none of them.
  StallDetector(const PeerStatuses& peers, int store_server, const WaitLimits& limits)
      : peers_(peers), store_server_(store_server), limits_(limits) {}

  void set_facts(Facts facts) { facts_ = std::move(facts); }

  // Both: nothing while the wait may end.
  // Another rank is out of step, or has failed. ours: as the others were told.
  std::optional<Verdict> certain(const Wait& wait, const RankStatus& ours) const;
  // A rank is unreachable, busy for too long, or slow.
  std::optional<Verdict> late(Wait& wait) const;

 private:
  std::optional<Verdict> out_of_step(const RankStatus& ours) const;
  std::optional<Verdict> failed() const;
  std::optional<Verdict> unreachable(const Wait& wait, Wait::Clock::time_point now) const;
  std::optional<Verdict> slow(const Wait& wait) const;
  bool is_there_too(const Wait& wait, int other) const;
  std::vector<int> ranks_with_store() const;
  std::optional<int> busy_rank(const Wait& wait) const;
  std::string describe_busy(int busy, Wait::Clock::time_point now) const;
  void report(Wait& wait, int busy, Wait::Clock::time_point now) const;
  bool is_needed(const Wait& wait, int other) const;
  int name(int other) const { return peers_.names()[other]; }

  const PeerStatuses& peers_;
  const int store_server_;
  const WaitLimits limits_;
  Facts facts_;
};

}  // namespace zeropage::comm::detail

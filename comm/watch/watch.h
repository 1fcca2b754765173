// Finds out, beside a world, why other ranks do not come to an operation, and ends waits that can never end.
//
// Every rank's watch writes heartbeats to the store while another rank asks for them. A rank that waits asks,
// writes its own status, and reads those of the others:
//   out of step    two ranks are in calls that never meet: both end, with both calls in their errors;
//   busy           a rank beats and is in no call of ours: it is waited for up to the busy limit, and
//                  every report interval a line on stderr says so;
//   unreachable    a rank that must come has not beaten for the deadline (its process is stopped, its
//                  network is gone): who waits ends;
//   slow           no rank is busy: who waits ends at the deadline.
// Among ranks that were split from others, the watch of all ranks decides which rank is busy, unreachable or slow,
// because a rank may wait in another world for another rank. And a rank that fails in one of its worlds fails in
// all.
//
// Waits shorter than WaitLimits::patience() never touch the store. While nobody waits a rank reads one
// key in a twelfth of the deadline.
//
// Lifetime: the store must outlive it; what the hooks use must live until stop().
// Threads: any. Owns a thread, which sleeps most of the time, looks at the store, and calls the hooks.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/detail/rank_names.h"
#include "comm/watch/activity.h"
#include "comm/watch/failure_reason.h"
#include "comm/watch/lost_ranks.h"
#include "comm/watch/peer_statuses.h"
#include "comm/watch/stall_detector.h"
#include "comm/watch/status_store.h"
#include "comm/watch/wait_limits.h"
#include "comm/watch/watch_group.h"
#include "comm/watch/watch_wakeups.h"

namespace zeropage::comm::detail {

class Watch final : public WatchGroup::Member {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store>
        store;  // of these ranks alone, over a connection on which nobody waits long
    int rank = 0;
    int size = 1;
    int store_server = -1;  // the rank whose process serves the store; -1: none of them
    WaitLimits limits;
    // Operations begin when they are called, or when the one before has ended: none is under way to
    // this watch while the thread that calls does something else.
    bool begins_at_call = false;
    // What the ranks are called in the world that they were split from.
    RankNames names;
    // This rank's other watches, the one of all ranks among them. Null: there are none.
    std::shared_ptr<WatchGroup> group;
  };

  // What it reads and ends, beside the store.
  struct Hooks {
    // Must end the operation in progress, and all later ones, with an error; verdict() has its words.
    std::function<void()> interrupt;
    // The ranks whose connection to this one has broken. May be empty.
    std::function<std::vector<int>()> lost_ranks;
    StallDetector::Facts facts;
    // Leaves an account where the others look once this rank does not come. May be empty.
    std::function<void(const FailureReason& account)> tell;
  };

  // Writes this rank's keys: once all ranks have one, all may look.
  explicit Watch(const Options& options);
  ~Watch() override { stop(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Begins to read the store, and to answer ranks that ask.
  void start(Hooks hooks);
  // Stops the thread, which uses the hooks no more. If all operations have completed, it writes that to the store
  // before the connections end: ranks that are still in the last operation miss nothing of ours.
  void stop();

  const WaitLimits& limits() const { return limits_; }
  // Where who calls notes what begins, and finds the verdicts.
  Activity& activity() override { return activity_; }

  // This rank has failed for that reason, in an operation or in texts: its other watches end too.
  void fail_group(const FailureReason& account);
  // The same where a rank has only let go of these ranks' world, in order: the others go on, unless that was the world of all ranks.
  void leave_group(const FailureReason& account);
  // This rank lets go of a part of the world: what it began there may end in any way from here on, and its other watches go on.
  void begin_leave();
  // One of those has.
  void fail_with(const FailureReason& account) override;
  void wait_until_announced() override;
  // The reason that a rank which has failed has written for these ranks.
  std::optional<FailureReason> failure_of(int rank) const;

 private:
  bool is_of_part() const;
  void work();
  void look();
  void look_for_lost(const Call& call);
  std::optional<Verdict> verdict_on(Wait& wait, const RankStatus& ours);
  std::optional<Verdict> late_in_world(Activity& world, Wait& wait) const;
  bool exchange_statuses(const RankStatus& ours);
  void wait_until_others_know(RankStatus ours, const Activity::Stalled& vain);
  void announce_failure();

  const WaitLimits limits_;
  const bool serves_store_;
  const std::shared_ptr<WatchGroup> group_;
  Hooks hooks_;  // constant from start() on
  std::atomic<bool> is_leaving_{false};
  Activity activity_;

  // Owned by the thread, and by stop() after it.
  StatusStore store_;
  PeerStatuses peers_;
  StallDetector stalls_;
  LostRanks lost_{store_};

  WatchWakeups wakeups_;
  std::thread thread_;  // last: uses everything above
};

}  // namespace zeropage::comm::detail

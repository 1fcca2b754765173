// Tells ranks that wait from ranks that never will: beside a world, finds out why the others do not come.
//
// Every rank's watch beats in the store while somebody asks for it. Who waits asks, tells where it
// stands, and reads where the others do:
//   out of step    two ranks are in calls that never meet: both end, with both calls in their errors;
//   busy           a rank beats and is in no call of ours: it is waited for up to the busy limit, and
//                  every report interval a line on stderr says so;
//   unreachable    a rank that must come has not beaten for the deadline (its process is stopped, its
//                  network is gone): who waits ends;
//   slow           no rank is busy: who waits ends at the deadline.
// Waits shorter than WaitLimits::patience() never touch the store. While nobody waits a rank reads one
// key in a twelfth of the deadline.
//
// Lifetime: the store must outlive it; what the hooks use must live until stop().
// Threads: any. Owns a thread, which sleeps most of the time, looks at the store, and calls the hooks.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/detail/activity.h"
#include "comm/detail/judge.h"
#include "comm/detail/lost_ranks.h"
#include "comm/detail/roll.h"
#include "comm/detail/standing_store.h"
#include "comm/detail/wait_limits.h"

namespace zeropage::comm::detail {

class Watch {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;  // of these ranks alone
    int rank = 0;
    int size = 1;
    int store_server = -1;  // the rank whose process serves the store; -1: none of them
    WaitLimits limits;
    // Operations begin when they are called, or when the one before has ended: none is under way to
    // this watch while the thread that calls does something else.
    bool begins_at_call = false;
  };

  // What it looks at and ends beside the store.
  struct Hooks {
    // Must end the operation in progress, and all later ones, with an error; verdict() has its words.
    std::function<void()> interrupt;
    // The ranks whose connection to this one has broken. May be empty.
    std::function<std::vector<int>()> lost_ranks;
    Judge::Facts facts;
  };

  // Writes this rank's keys: once all ranks have one, all may look.
  explicit Watch(const Options& options);
  ~Watch() { stop(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Begins to look, and to answer who asks.
  void start(Hooks hooks);
  // Uses the hooks no more. Where all operations have completed the others are told so, before our
  // connections to them end: those that still are in the last one lack nothing of ours.
  void stop();

  const WaitLimits& limits() const { return limits_; }
  // Where who calls notes what begins, and finds the verdicts.
  Activity& activity() { return activity_; }

 private:
  void work();
  void look();
  void look_for_lost(const Call& call);
  bool tell_and_listen(const Standing& ours);
  void wait_until_others_know(Standing ours, const Activity::InVain& vain);
  bool stops_within(std::chrono::milliseconds time);

  const WaitLimits limits_;
  Hooks hooks_;  // constant from start() on
  Activity activity_;

  // Owned by the thread, and by stop() after it.
  StandingStore store_;
  Roll roll_;
  Judge judge_;
  LostRanks lost_{store_};

  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;  // guarded by mutex_

  std::thread thread_;  // last: uses everything above
};

}  // namespace zeropage::comm::detail

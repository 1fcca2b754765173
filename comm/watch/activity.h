// The call that this rank is in: an operation, a wait for texts, an operation of its device, or one of these among
// some of the ranks; and why one of them cannot end.
//
// Callers note here what begins and ends. The rank's watch (comm/watch/watch.h) reads it, writes it to the store
// for the others, and sets the verdicts. An operation costs two locks that are never held for long.
//
// Threads: perform() on the thread that performs the operations; the rest on any.
// Throws: perform() what the operation throws.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/watch/failure_reason.h"
#include "comm/watch/rank_status.h"
#include "comm/watch/wait.h"
#include "comm/watch/wait_limits.h"

namespace zeropage::comm::detail {

// What this rank has called so far.
struct CallHistory {
  using Clock = Wait::Clock;

  uint64_t waits = 0;            // begun
  uint64_t collectives = 0;      // begun
  uint64_t texts = 0;            // rounds of them to which this rank has given its own
  std::map<int, uint64_t> sent;  // messages, by the rank to which
  std::optional<Call> last;      // that ended
  // The last that ended which cannot end without every rank.
  std::optional<Call> last_shared;
  Clock::time_point last_shared_at;
  Clock::time_point outside_since = Clock::now();
  bool has_failed = false;  // an operation
};

class Activity {
 public:
  using Clock = Wait::Clock;

  // begins_at_call: operations begin when they are called, or when the one before has ended. None is
  // under way to the one who watches while the thread that calls does something else.
  Activity(const WaitLimits& limits, bool begins_at_call)
      : limits_(limits), begins_at_call_(begins_at_call) {}
  Activity(const Activity&) = delete;
  Activity& operator=(const Activity&) = delete;

  template <typename Body>
  void perform(const Call& call, const Body& body) {
    begin(call);
    try {
      body();
    } catch (...) {
      end(call, /*completed=*/false);
      throw;
    }
    end(call, /*completed=*/true);
  }

  // The operation that this rank's device is in, which no thread here need wait for. Of one at a time;
  // a verdict says why it cannot end.
  void begin_on_device(const Call& call);
  void end_on_device();
  std::optional<Verdict> verdict_on_device() const;

  // Once there is one, every error of an operation follows from it.
  std::optional<Verdict> verdict() const;

  // While it lives, the thread that made it waits for texts of other ranks. One a round, once this rank's text is there.
  class TextWait;

  // Notes that this rank has failed in another of its worlds: what is under way cannot end, nor what follows.
  // Returns whether that was not known. rank: this one.
  bool fail_with(int rank, const FailureReason& account);
  std::optional<FailureReason> failure() const;

  // ---- for the watch ----

  // Whether verdicts will come. Until then waits for texts end at their deadline.
  void set_watched(bool is_watched);

  struct Report {
    RankStatus status;  // without a beat
    CallHistory history;
  };
  Report report() const;
  // For the others once this rank ends: nothing unless all that was begun has completed, as they must
  // take this rank for lost then.
  std::optional<RankStatus> leave_status() const;
  // The longest wait that has no verdict.
  std::optional<Clock::time_point> waiting_since() const;
  // The operation that is under way, if it began by then and has no verdict.
  std::optional<Call> operation_begun_by(Clock::time_point moment) const;

  struct Stalled {
    Verdict verdict;
    Call call;
  };
  using StallCheck = std::function<std::optional<Verdict>(Wait& wait)>;
  // These ask about what is waited in, unless something has begun since the report: the others have not
  // been told of that. Texts: and what is waited for elsewhere.
  void check_texts(const Report& report, const StallCheck& check_stall);
  std::optional<Stalled> check_operation(const Report& report, const StallCheck& check_stall);
  // The verdict counts from end_device_with() on.
  std::optional<Stalled> check_on_device(const Report& report, const StallCheck& check_stall);
  void end_device_with(const Verdict& verdict);
  // The operation, and all later ones.
  void end_operations_with(const Verdict& verdict);

 private:
  void begin(const Call& call);
  void end(const Call& call, bool completed);
  RankStatus status() const;

  // Constant after construction.
  const WaitLimits limits_;
  const bool begins_at_call_;
  const std::thread::id caller_ = std::this_thread::get_id();

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  bool is_watched_ = false;
  CallHistory history_;
  std::optional<Wait> operation_;
  std::list<Wait> texts_;  // and waits elsewhere
  std::optional<Wait> on_device_;
  std::optional<Verdict> verdict_;  // on operation_ and all later ones
  std::optional<FailureReason> failure_;

  friend class WaitInWorld;
};

// Lifetime: the activity must outlive it.
class Activity::TextWait {
 public:
  TextWait(Activity& activity, const std::string& topic, std::chrono::milliseconds deadline);
  ~TextWait();
  TextWait(const TextWait&) = delete;
  TextWait& operator=(const TextWait&) = delete;

  void await(int rank);
  // Why it is in vain; nothing while it may end. Without words before there is a watch, when nobody
  // beats yet.
  std::optional<Verdict> verdict() const;

 private:
  Activity& activity_;
  std::list<Wait>::iterator wait_;
};

// While it lives, this rank waits among some ranks of the world that they were split from.
// Lifetime: the world's activity must outlive it.
class WaitInWorld {
 public:
  // what: as the rank's standing says it; ranks: of the world; wait: among them.
  WaitInWorld(Activity& world, std::string what, std::vector<int> ranks, const Wait& wait);
  ~WaitInWorld();
  WaitInWorld(const WaitInWorld&) = delete;
  WaitInWorld& operator=(const WaitInWorld&) = delete;

  std::optional<Verdict> verdict() const;

 private:
  Activity& world_;
  std::list<Wait>::iterator wait_;
};

}  // namespace zeropage::comm::detail

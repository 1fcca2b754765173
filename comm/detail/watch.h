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
// Waits shorter than `patience` never touch the store; an operation costs two locks that nobody else
// holds. While nobody waits a rank reads one key in a twelfth of the deadline.
//
// Lifetime: the store must outlive it; what the hooks use must live until stop().
// Threads: perform() on the thread that performs the operations; the rest on any. Owns
// a thread, which sleeps most of the time, looks at the store, and calls the hooks.
// Throws: perform() what the operation throws.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/detail/account.h"
#include "comm/detail/peer_error.h"
#include "comm/detail/roll.h"
#include "comm/detail/standing.h"

namespace zeropage::comm::detail {

class Kin;

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
    // What the ranks are called in the world that they were split from, and its watch, which knows who of
    // all is busy or out of reach. Null: these ranks were not split from others.
    RankNames names;
    std::shared_ptr<Watch> world;
    // This rank's other watches, which end with this one; null: there are none.
    std::shared_ptr<Kin> kin;
  };

  // What it looks at and ends beside the store.
  struct Hooks {
    // Must end the operation in progress, and all later ones, with an error; verdict() has its words.
    std::function<void()> interrupt;
    // The ranks whose connection to this one has broken. May be empty.
    std::function<std::vector<int>()> lost_ranks;
    Roll::Facts facts;
    // Leaves an account where the others look once this rank does not come. May be empty.
    std::function<void(const Account& account)> tell;
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

  const WaitLimits& limits() const { return options_.limits; }

  template <typename Body>
  void perform(const Call& call, const Body& body) {
    const bool is_condemned = begin(call);
    try {
      if (is_condemned) throw PeerError::of_abort(options_.rank);
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

  // A rank that was lost while the operation waited, if that is why it was interrupted.
  std::optional<int> lost_rank() const;
  // Once there is one, every error of an operation follows from it.
  std::optional<Verdict> verdict() const;

  // This rank has failed with that account, in an operation or in texts: its other watches end too.
  void tell_kin(const Account& account);
  // One of this rank's other watches has: ends what is under way, and all that follows, for the same cause,
  // and lets the others know it.
  void condemn(const Account& account);
  void wait_until_told();
  // Why a rank does not come that has left an account for these ranks.
  std::optional<Account> account_of(int rank) const;

  // While it lives, the thread that made it waits for texts of other ranks.
  class TextWait;
  // While it lives, this rank waits among some ranks of the world, in an operation or texts of theirs.
  class WorldWait;

 private:
  using Clock = Roll::Clock;
  using Lock = std::unique_lock<std::mutex>;

  bool begin(const Call& call);
  void end(const Call& call, bool completed);
  void work();
  void look(Lock& lock);
  void look_at_device(Lock& lock, Standing ours);
  void answer(Lock& lock);
  bool find_lost(Lock& lock);
  std::optional<int> first_missed(const std::vector<int>& lost, const Call& call);
  void say_farewell();
  bool tell_and_listen(const Standing& ours);
  std::optional<std::string> ask(std::function<std::string()> question) const;
  Standing own_standing();
  std::optional<Verdict> late(Roll::Wait& wait, const std::optional<Call>& call);
  void tell_condemnation(Lock& lock);
  const std::string& own_key() const { return keys_[static_cast<size_t>(options_.rank)]; }
  void end_call(Lock& lock, Standing ours);
  void wait_until_others_know(const Standing& ours);

  // Constant after construction.
  const Options options_;
  const c10::intrusive_ptr<c10d::Store> store_;  // a connection of its own
  const std::chrono::milliseconds patience_;
  const std::thread::id caller_ = std::this_thread::get_id();
  std::vector<std::string> keys_;

  Hooks hooks_;  // from start() on

  std::mutex condemning_;  // held while hooks_ are used by another thread

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  // Guarded by mutex_.
  bool stopping_ = false;
  bool running_ = false;
  uint64_t beat_ = 0;
  Roll roll_;
  std::optional<Call> current_;
  uint64_t begun_ = 0;  // collectives
  Roll::Wait wait_;     // of current_
  std::list<Roll::Wait> texts_;
  std::list<Roll::Wait> elsewhere_;  // among some of these ranks
  std::optional<Call> on_device_;
  Roll::Wait device_wait_;  // of on_device_
  std::string asked_;       // what was last seen of who asks
  std::optional<Call> last_;
  Clock::time_point outside_since_ = Clock::now();
  std::optional<Verdict> verdict_;
  std::optional<int> lost_rank_;
  bool has_failed_ = false;  // an operation
  std::optional<Account> condemned_;
  bool has_told_ = false;  // the others of it

  // The thread's: since when ranks are lost, and the store does not say why.
  std::optional<Clock::time_point> unexplained_since_;

  std::thread thread_;  // last: uses everything above
};

// Lifetime: the watch must outlive it.
class Watch::TextWait {
 public:
  TextWait(Watch& watch, const std::string& topic, std::chrono::milliseconds deadline);
  ~TextWait();
  TextWait(const TextWait&) = delete;
  TextWait& operator=(const TextWait&) = delete;

  void await(int rank);
  // Why it is in vain; nothing while it may end. Without words before start(), when nobody beats yet.
  std::optional<Verdict> verdict() const;

 private:
  Watch& watch_;
  std::list<Roll::Wait>::iterator wait_;
};

// Lifetime: the watch must outlive it.
class Watch::WorldWait {
 public:
  // ranks: of the world; wait: among them.
  WorldWait(Watch& world, std::string what, std::vector<int> ranks, const Roll::Wait& wait);
  ~WorldWait();
  WorldWait(const WorldWait&) = delete;
  WorldWait& operator=(const WorldWait&) = delete;

  std::optional<Verdict> verdict() const;

 private:
  Watch& world_;
  std::list<Roll::Wait>::iterator wait_;
};

}  // namespace zeropage::comm::detail

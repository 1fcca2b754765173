// Finds out, beside an operation that waits, whether it waits in vain.
//
// An operation that lasts longer than `patience` is told to the others in the store, and what they
// tell is read: ranks that went out of step then end with an error that names both calls, instead
// of waiting for each other until the deadline. A rank that is merely slow is left alone. Shorter
// operations never touch the store; they cost two locks that nobody else holds.
//
// Lifetime: the store and what `interrupt` uses must outlive it.
// Threads: perform(), verdict() and describe_others() on the thread that performs the operations; owns a
// thread, which sleeps most of the time, looks at the store, and calls `interrupt`.
// Throws: perform() what the operation throws.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/detail/standing.h"

namespace zeropage::comm::detail {

class Watch {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;  // of these ranks alone
    int rank = 0;
    int size = 1;
    std::chrono::milliseconds patience = std::chrono::seconds(1);
    // Must end the operation in progress, and all later ones, with an error; verdict() has its
    // words.
    std::function<void()> interrupt;
    // The ranks whose connection to this one has broken.
    std::function<std::vector<int>()> lost_ranks;
  };

  // Why the operation in progress cannot end.
  struct Verdict {
    int other = 0;  // the rank that is out of step, or failed
    std::string words;
  };

  // A patience that leaves time to look before the deadline.
  static std::chrono::milliseconds patience_for(std::chrono::milliseconds deadline) {
    return std::min<std::chrono::milliseconds>(std::chrono::seconds(1), deadline / 4);
  }

  explicit Watch(const Options& options);
  ~Watch();

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

  // A rank that was lost while the operation waited, if that is why it was interrupted.
  std::optional<int> lost_rank() const;
  // Once there is one, every error of an operation follows from it.
  std::optional<Verdict> verdict() const;

  // Where the other ranks stand or were last heard, as sentences for an error.
  std::string describe_others() const;

 private:
  using Clock = std::chrono::steady_clock;

  struct Heard {
    std::optional<Standing> standing;
    uint64_t operation = 0;  // of ours, during which it was heard first
    uint64_t first_beat = 0;
    Clock::time_point at;  // when its beat last changed; unset: not since it was heard first
  };

  void begin(const Call& call);
  void end(const Call& call, bool completed);
  void work();
  // Returns whether it has ended the operation.
  bool look(Standing ours);
  bool find_lost(const Call& call);
  bool tell_and_listen(const Standing& ours);
  void listen(int other, const std::string& text);
  std::optional<Verdict> judge(const Standing& ours) const;
  void wait_until_others_know(const Standing& ours);
  bool waits_now(const Heard& heard) const;
  std::string describe(int other) const;

  // Constant after construction.
  const Options options_;
  const c10::intrusive_ptr<c10d::Store> store_;  // a connection of its own
  std::vector<std::string> keys_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  // Guarded by mutex_.
  bool stopping_ = false;
  std::optional<Call> current_;
  uint64_t operation_ = 0;  // counts them
  uint64_t begun_ = 0;      // collectives
  Clock::time_point began_;
  std::optional<Call> last_shared_;  // the last operation that cannot end without every rank
  Clock::time_point last_shared_at_;
  std::vector<Heard> heard_;
  std::optional<Verdict> verdict_;
  std::optional<int> lost_rank_;

  std::thread thread_;  // last: uses everything above
};

}  // namespace zeropage::comm::detail

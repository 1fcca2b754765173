// What the other ranks have told of where they stand, and whether a wait for them is in vain.
//
// Threads: none of its own; guarded by its owner.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/detail/rank_names.h"
#include "comm/detail/standing.h"
#include "comm/detail/wait_limits.h"

namespace zeropage::comm::detail {

// Why what waits cannot end.
struct Verdict {
  enum class Kind : uint8_t { kOutOfStep, kFailed, kLate };
  Kind kind = Kind::kLate;
  int other = 0;  // the rank that is to blame
  std::string words;
};

class Roll {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    int rank = 0;
    int size = 1;
    int store_server = -1;  // the rank whose process serves the store; -1: none of them
    WaitLimits limits;
    RankNames names;
  };

  // What is known beside what ranks tell. All may be empty.
  struct Facts {
    std::vector<std::string> hosts;  // by rank
    // Of a rank's process, "; its process 7 is stopped".
    std::function<std::string(int rank)> state_of;
    bool broadcasts_wait = false;  // a broadcast does not end without every rank
  };

  struct Wait {
    std::string what;
    std::chrono::milliseconds deadline{};
    bool by_caller = true;  // by the thread that calls operations too
    Clock::time_point began;
    Clock::time_point counted_from;  // the deadline is: later while a rank is busy
    Clock::time_point next_report;
    std::vector<int> awaited;  // empty: all
    std::optional<Verdict> verdict;
    std::shared_ptr<void> in_world;  // among the ranks of the world that these were split from
  };

  explicit Roll(const Options& options)
      : options_(options), heard_(static_cast<size_t>(options.size)) {}

  void learn(Facts facts);
  Wait begin_wait(std::string what, std::chrono::milliseconds deadline) const;

  // A wait begins: what stands in the store from before may be old.
  void begin_period() { ++period_; }
  uint64_t period() const { return period_; }
  void listen(int other, const std::string& text);
  void note_answer_of_store() { store_answered_at_ = Clock::now(); }
  // An operation ended that cannot end without every rank.
  void note_shared(const Call& call);

  // It has beaten since the wait began.
  bool beats(int other) const;
  // Whether all ranks that wait now are about to end.
  bool all_know() const;

  std::optional<Verdict> out_of_step(const Standing& ours) const;
  // Another rank has failed.
  std::optional<Verdict> failed() const;
  // A rank is unreachable, busy for too long, or slow. Says on stderr who is waited for. call: what the
  // wait is in, if it is an operation.
  std::optional<Verdict> late(Wait& wait, const std::optional<Call>& call) const;
  std::optional<Verdict> slow(const Wait& wait, const std::optional<Call>& call) const;

 private:
  struct Heard {
    std::optional<Standing> standing;
    uint64_t period = 0;  // during which it was heard first
    uint64_t first_beat = 0;
    Clock::time_point at;  // when its beat last changed; unset: not since it was heard first
  };

  std::optional<Verdict> unreachable(const Wait& wait, Clock::time_point now) const;
  std::vector<int> ranks_with_store() const;
  std::optional<int> busy_rank(const Wait& wait) const;
  std::string describe_busy(int busy, Clock::time_point now) const;
  void report(Wait& wait, const std::optional<Call>& call, int busy, Clock::time_point now) const;
  bool is_needed(const Wait& wait, int other) const;
  int name(int other) const { return options_.names[other]; }
  const Heard& of(int other) const { return heard_[static_cast<size_t>(other)]; }
  std::string describe(int other) const;
  std::string describe_others() const;

  const Options options_;
  Facts facts_;
  uint64_t period_ = 0;
  Clock::time_point store_answered_at_ = Clock::now();
  std::optional<Call> last_shared_;
  Clock::time_point last_shared_at_;
  std::vector<Heard> heard_;  // by rank
};

}  // namespace zeropage::comm::detail

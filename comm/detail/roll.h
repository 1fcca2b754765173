// What the other ranks have told of where they stand, and when.
//
// Threads: one at a time, the watch's.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/detail/activity.h"
#include "comm/detail/standing.h"

namespace zeropage::comm::detail {

class Roll {
 public:
  using Clock = std::chrono::steady_clock;

  // deadline: a rank that is not heard for half of it is said to be silent.
  Roll(int rank, int size, std::chrono::milliseconds deadline)
      : rank_(rank), deadline_(deadline), heard_(static_cast<size_t>(size)) {}

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(heard_.size()); }

  // What this rank has called when it begins to listen. Where a wait has begun since the last time, what
  // stands in the store from before may be old.
  void turn_to(const CallHistory& ours) { ours_ = ours; }
  void listen(int other, const std::string& text);
  void note_answer_of_store() { store_answered_at_ = Clock::now(); }

  // What it told last; nothing if it has told nothing.
  const std::optional<Standing>& standing(int other) const { return of(other).standing; }
  // When its beat last changed; unset: not since it was heard first.
  Clock::time_point heard_at(int other) const { return of(other).at; }
  Clock::time_point store_answered_at() const { return store_answered_at_; }
  // It has beaten since the wait began.
  bool beats(int other) const;
  // Whether all ranks that wait now are about to end.
  bool all_know() const;

  // "Rank 1 stands at all_gather #12 of ..."
  std::string describe(int other) const;
  std::string describe_others() const;

 private:
  struct Heard {
    std::optional<Standing> standing;
    uint64_t period = 0;  // during which it was heard first
    uint64_t first_beat = 0;
    Clock::time_point at;
  };

  const Heard& of(int other) const { return heard_[static_cast<size_t>(other)]; }

  // Constant after construction.
  const int rank_;
  const std::chrono::milliseconds deadline_;

  CallHistory ours_;
  Clock::time_point store_answered_at_ = Clock::now();
  std::vector<Heard> heard_;  // by rank
};

// "1.5 s"
std::string tenths_of_seconds(std::chrono::steady_clock::duration time);

}  // namespace zeropage::comm::detail

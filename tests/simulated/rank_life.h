// A simulated process of a rank: what its threads do passes here, so that it can be stopped, cut off and killed.
//
// Threads: any.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <stdexcept>

namespace zeropage::simulated {

// The process has been killed. Leaves survive(), and then the rank's thread.
class Killed : public std::runtime_error {
 public:
  Killed() : std::runtime_error("this simulated process was killed") {}
};

class RankLife {
 public:
  // What the process does beyond itself, such as a message: waits while that is held up, and returns false where the process is dead.
  bool pass();
  // The same; throws Killed.
  void pass_or_throw();
  bool is_dead() const;

  void kill();
  // Nothing of it moves for that long; nothing: until it is killed.
  void hold(std::optional<std::chrono::milliseconds> time);
  // What passes from here on is late.
  void slow_down(std::chrono::milliseconds by);
  // The calling thread alone stands still until the process is killed; throws Killed then.
  void stand_still();

 private:
  using Clock = std::chrono::steady_clock;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool is_dead_ = false;
  Clock::time_point held_until_{};
  std::chrono::milliseconds late_by_{};
};

}  // namespace zeropage::simulated

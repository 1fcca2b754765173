#include "tests/simulated/rank_life.h"

#include <algorithm>
#include <thread>

namespace zeropage::simulated {

bool RankLife::pass() {
  std::unique_lock lock(mutex_);
  while (!is_dead_ && Clock::now() < held_until_) {
    changed_.wait_until(lock, std::min(held_until_, Clock::now() + std::chrono::milliseconds(50)));
  }
  if (is_dead_) return false;
  const auto late_by = late_by_;
  lock.unlock();
  if (late_by.count() > 0) std::this_thread::sleep_for(late_by);
  return true;
}

void RankLife::pass_or_throw() {
  if (!pass()) throw Killed();
}

bool RankLife::is_dead() const {
  const std::lock_guard lock(mutex_);
  return is_dead_;
}

void RankLife::kill() {
  {
    const std::lock_guard lock(mutex_);
    is_dead_ = true;
  }
  changed_.notify_all();
}

void RankLife::hold(std::optional<std::chrono::milliseconds> time) {
  const std::lock_guard lock(mutex_);
  held_until_ = time ? Clock::now() + *time : Clock::time_point::max();
}

void RankLife::slow_down(std::chrono::milliseconds by) {
  const std::lock_guard lock(mutex_);
  late_by_ = by;
}

void RankLife::stand_still() {
  std::unique_lock lock(mutex_);
  while (!is_dead_) changed_.wait_for(lock, std::chrono::milliseconds(50));
  throw Killed();
}

}  // namespace zeropage::simulated

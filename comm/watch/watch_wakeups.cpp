#include "comm/watch/watch_wakeups.h"

namespace zeropage::comm::detail {

void WatchWakeups::start() {
  const std::lock_guard lock(mutex_);
  running_ = true;
}

bool WatchWakeups::stops_within(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, time, [this] { return !running_ || announced_ == Announced::kDue; });
  return !running_;
}

void WatchWakeups::stop() {
  const std::lock_guard lock(mutex_);
  running_ = false;
  changed_.notify_all();
}

void WatchWakeups::tell() {
  const std::lock_guard lock(mutex_);
  if (announced_ != Announced::kNothing) return;
  announced_ = Announced::kDue;
  changed_.notify_all();
}

bool WatchWakeups::is_due() const {
  const std::lock_guard lock(mutex_);
  return announced_ == Announced::kDue;
}

void WatchWakeups::note(Announced announced) {
  const std::lock_guard lock(mutex_);
  announced_ = announced;
  changed_.notify_all();
}

void WatchWakeups::wait_until(Announced announced, std::chrono::milliseconds most) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, most, [&] {
    return !running_ || announced_ == Announced::kNothing || announced_ >= announced;
  });
}

}  // namespace zeropage::comm::detail

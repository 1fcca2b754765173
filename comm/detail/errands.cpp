#include "comm/detail/errands.h"

namespace zeropage::comm::detail {

void Errands::start() {
  const std::lock_guard lock(mutex_);
  running_ = true;
}

bool Errands::stops_within(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, time, [this] { return !running_ || told_ == Told::kDue; });
  return !running_;
}

void Errands::stop() {
  const std::lock_guard lock(mutex_);
  running_ = false;
  changed_.notify_all();
}

void Errands::tell() {
  const std::lock_guard lock(mutex_);
  if (told_ != Told::kNothing) return;
  told_ = Told::kDue;
  changed_.notify_all();
}

bool Errands::is_due() const {
  const std::lock_guard lock(mutex_);
  return told_ == Told::kDue;
}

void Errands::note(Told told) {
  const std::lock_guard lock(mutex_);
  told_ = told;
  changed_.notify_all();
}

void Errands::wait_until(Told told, std::chrono::milliseconds most) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, most,
                    [&] { return !running_ || told_ == Told::kNothing || told_ >= told; });
}

}  // namespace zeropage::comm::detail

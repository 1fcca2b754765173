#include "comm/devices/device_wait.h"

#include <algorithm>

namespace zeropage::comm::detail {

std::string DeviceWait::look(const Call& call) {
  const auto now = Clock::now();
  if (!since_) since_ = now;
  if (!lost_since_ && lost_ranks_) {
    first_lost_ = lost_ranks_();
    if (!first_lost_.empty()) lost_since_ = now;
  }
  if (lost_since_ && now - std::max(*lost_since_, *since_) >= kAfterLoss) {
    std::string list;
    for (const int rank : first_lost_) list += (list.empty() ? "" : ", ") + std::to_string(rank);
    return c10::str("lost rank ", list, "; it has ended or was killed. See its last lines");
  }
  if (!watch_ || now - *since_ < kUntold) return "";
  if (!std::exchange(is_told_, true)) watch_->activity().begin_on_device(call);
  const auto verdict = watch_->activity().verdict_on_device();
  return verdict ? verdict->words : "";
}

void DeviceWait::end() {
  since_.reset();
  if (std::exchange(is_told_, false)) watch_->activity().end_on_device();
}

}  // namespace zeropage::comm::detail

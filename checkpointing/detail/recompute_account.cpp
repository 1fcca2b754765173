#include "checkpointing/detail/recompute_account.h"

#include <sstream>

namespace zeropage::checkpointing {

std::string to_string(const RecomputeStatistics& statistics) {
  std::ostringstream out;
  out << statistics.replays << " replays after " << statistics.forwards << " forwards, "
      << statistics.recomputed_flops << " FLOPs of " << statistics.forward_flops
      << " repeated; took " << statistics.recompute_seconds << " s";
  return out.str();
}

RecomputeStatistics recompute_statistics() {
  return detail::RecomputeAccount::of_this_thread()->statistics();
}

namespace detail {

const std::shared_ptr<RecomputeAccount>& RecomputeAccount::of_this_thread() {
  thread_local const auto account = std::make_shared<RecomputeAccount>();
  return account;
}

void RecomputeAccount::add_forward(double flops) {
  const std::lock_guard lock(mutex_);
  ++statistics_.forwards;
  statistics_.forward_flops += flops;
}

void RecomputeAccount::add_replay(double flops, double seconds) {
  const std::lock_guard lock(mutex_);
  ++statistics_.replays;
  statistics_.recomputed_flops += flops;
  statistics_.recompute_seconds += seconds;
}

RecomputeStatistics RecomputeAccount::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

}  // namespace detail
}  // namespace zeropage::checkpointing

// Which of the ranks that are lost an operation cannot end without.
//
// Ranks end an operation one after the other, and the first may be gone before the last has its bytes.
// So a rank that has ended after the operation is not missed: it says so in the store.
//
// Lifetime: the store must outlive it. Threads: one at a time, the watch's.
#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "comm/detail/call.h"
#include "comm/watch/status_store.h"

namespace zeropage::comm::detail {

class LostRanks {
 public:
  explicit LostRanks(const StatusStore& store) : store_(store) {}

  // lost: the ranks whose connection to this one has broken.
  std::optional<int> first_missed(std::vector<int> lost, const Call& call);

 private:
  using Clock = std::chrono::steady_clock;

  const StatusStore& store_;
  // Since when ranks are lost, and the store does not say why.
  std::optional<Clock::time_point> unexplained_since_;
};

}  // namespace zeropage::comm::detail

// One operation after the other on a device: whether the one under way cannot end, and why.
//
// Lifetime: what it is given must outlive it. Threads: one at a time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/detail/call.h"
#include "comm/watch/watch.h"

namespace zeropage::comm::detail {

class DeviceWait {
 public:
  // What ends sooner is not told to the others.
  static constexpr std::chrono::milliseconds kUntold{100};
  // An operation that needs nothing more of a lost rank still has this long to end.
  static constexpr std::chrono::milliseconds kAfterLoss{1000};

  // watch: finds out why an operation does not end; null: nobody waits for other ranks. lost_ranks: asked
  // until it names some; may be empty.
  DeviceWait(std::shared_ptr<Watch> watch, std::function<std::vector<int>()> lost_ranks)
      : watch_(std::move(watch)), lost_ranks_(std::move(lost_ranks)) {}

  // What is wrong with the operation, which has begun on the device; "" if nothing. Its time begins at the
  // first call.
  std::string look(const Call& call);
  // It has ended, or nobody looks at it any longer.
  void end();

 private:
  using Clock = std::chrono::steady_clock;

  // Constant after construction.
  const std::shared_ptr<Watch> watch_;
  const std::function<std::vector<int>()> lost_ranks_;

  std::optional<Clock::time_point> since_;
  bool is_told_ = false;  // to watch_
  // The first that were lost, of all operations: others end because of them.
  std::vector<int> first_lost_;
  std::optional<Clock::time_point> lost_since_;
};

}  // namespace zeropage::comm::detail

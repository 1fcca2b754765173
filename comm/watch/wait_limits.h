// How long a rank waits for the others (WorldOptions has what each means).
#pragma once

#include <algorithm>
#include <chrono>

namespace zeropage::comm::detail {

struct WaitLimits {
  std::chrono::milliseconds deadline = std::chrono::seconds(60);
  std::chrono::milliseconds busy_limit = std::chrono::minutes(30);
  std::chrono::milliseconds report_interval = std::chrono::seconds(30);

  // How long a rank waits before it asks the others: a rank that is only a little late is not asked for.
  std::chrono::milliseconds patience() const {
    return std::min(std::chrono::milliseconds(500), deadline / 4);
  }
  // No wait is longer: what ends it then is the last resort.
  std::chrono::milliseconds longest() const { return busy_limit + 2 * deadline; }
};

// "1.5 s"
inline double in_seconds(std::chrono::milliseconds time) {
  return static_cast<double>(time.count()) / 1000.0;
}

}  // namespace zeropage::comm::detail

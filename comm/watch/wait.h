// One wait of this rank for others, and why it is in vain.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/watch/rank_status.h"

namespace zeropage::comm::detail {

// Why what waits cannot end.
struct Verdict {
  enum class Kind : uint8_t { kOutOfStep, kFailed, kLate, kLost };
  Kind kind = Kind::kLate;
  int other = 0;  // the rank that is to blame
  std::string words;
};

class WaitInWorld;

struct Wait {
  using Clock = std::chrono::steady_clock;

  RankStatus::Where where = RankStatus::Where::kInCall;  // not kOutside, kLeft
  Call call;                                             // kInCall, kOnDevice
  std::string words;         // kInTexts, kElsewhere: as in the rank's standing
  uint64_t texts = 0;        // kInTexts: as there
  std::vector<int> awaited;  // empty: all
  std::chrono::milliseconds deadline{};
  bool by_caller = true;  // by the thread that calls operations too
  Clock::time_point began = Clock::now();
  Clock::time_point counted_from = began;  // the deadline is: later while a rank is busy
  Clock::time_point reported_at = began;   // when stderr was last told of it
  std::optional<Verdict> verdict;
  // The same among the ranks of the world that these were split from.
  std::shared_ptr<WaitInWorld> in_world;

  // In an operation, or in one of the device.
  static Wait for_call(RankStatus::Where where, const Call& call,
                       std::chrono::milliseconds deadline) {
    Wait wait{.where = where, .call = call, .deadline = deadline};
    if (call.operation == Operation::kPair) wait.awaited = {call.peer};
    return wait;
  }

  bool is_for_call() const {
    return where == RankStatus::Where::kInCall || where == RankStatus::Where::kOnDevice;
  }
  std::string describe() const { return is_for_call() ? call.describe() : words; }
};

}  // namespace zeropage::comm::detail

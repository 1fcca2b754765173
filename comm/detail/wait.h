// One wait of this rank for others, and why it is in vain.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/detail/standing.h"

namespace zeropage::comm::detail {

// Why what waits cannot end.
struct Verdict {
  enum class Kind : uint8_t { kOutOfStep, kFailed, kLate, kLost };
  Kind kind = Kind::kLate;
  int other = 0;  // the rank that is to blame
  std::string words;
};

struct Wait {
  using Clock = std::chrono::steady_clock;

  Standing::Where where = Standing::Where::kInCall;  // kInCall, kInTexts or kOnDevice
  Call call;                                         // kInCall, kOnDevice
  std::string words;                                 // kInTexts: what they are about
  std::vector<int> awaited;                          // empty: all
  std::chrono::milliseconds deadline{};
  bool by_caller = true;  // by the thread that calls operations too
  Clock::time_point began = Clock::now();
  Clock::time_point counted_from = began;  // the deadline is: later while a rank is busy
  Clock::time_point reported_at = began;   // when stderr was last told of it
  std::optional<Verdict> verdict;

  // In an operation, or in one of the device.
  static Wait for_call(Standing::Where where, const Call& call,
                       std::chrono::milliseconds deadline) {
    Wait wait{.where = where, .call = call, .deadline = deadline};
    if (call.operation == Operation::kPair) wait.awaited = {call.peer};
    return wait;
  }

  bool is_for_texts() const { return where == Standing::Where::kInTexts; }
  std::string describe() const { return is_for_texts() ? words : call.describe(); }
};

}  // namespace zeropage::comm::detail

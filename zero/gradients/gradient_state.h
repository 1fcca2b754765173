// The states of a page's gradient, and the moves between them: a machine whose every change goes through move_to().
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace zeropage::zero {

enum class GradientState : uint8_t {
  kCollecting,  // this rank's own gradients come into the bucket
  kReopened,    // the same, and what was reduced before is kept beside, to be added
  kReducing,    // the bucket travels
  kReduced,     // the mean is there
  kSummed,      // a part of a sum over micro-batches is there
};
inline constexpr size_t kGradientStateCount = 5;

// "collecting".
std::string_view name(GradientState state);

struct GradientMove {
  GradientState from;
  GradientState to;
  std::string_view by;  // the methods of PageGradient that make it
};

inline constexpr auto kGradientMoves = [] {
  using enum GradientState;
  return std::array<GradientMove, 11>{{
      {kCollecting, kReducing, "start"},
      {kReopened, kReducing, "start"},
      {kReducing, kReduced, "close"},
      {kReducing, kSummed, "close"},
      {kReduced, kReopened, "reopen"},
      {kSummed, kReopened, "reopen"},
      {kCollecting, kCollecting, "end_without_reduction, abandon, drop"},
      {kReopened, kCollecting, "end_without_reduction, abandon, drop"},
      {kReduced, kReduced, "drop"},
      {kSummed, kReduced, "drop"},
      // A backward that threw between start and close: what travelled is dropped.
      {kReducing, kCollecting, "drop"},
  }};
}();

class GradientStateMachine {
 public:
  GradientState now() const { return now_; }
  // Throws c10::Error where kGradientMoves has no such move.
  void move_to(GradientState next);

 private:
  GradientState now_ = GradientState::kCollecting;
};

}  // namespace zeropage::zero

#include "zero/gradients/gradient_state.h"

#include <algorithm>

#include <c10/util/Exception.h>

namespace zeropage::zero {

std::string_view name(GradientState state) {
  switch (state) {
    case GradientState::kCollecting:
      return "collecting";
    case GradientState::kReopened:
      return "reopened";
    case GradientState::kReducing:
      return "reducing";
    case GradientState::kReduced:
      return "reduced";
    case GradientState::kSummed:
      return "summed";
  }
  return "?";
}

void GradientStateMachine::move_to(GradientState next) {
  const bool is_allowed =
      std::any_of(kGradientMoves.begin(), kGradientMoves.end(),
                  [&](const GradientMove& move) { return move.from == now_ && move.to == next; });
  TORCH_INTERNAL_ASSERT(is_allowed, "a page's gradient cannot go from ", name(now_), " to ",
                        name(next));
  now_ = next;
}

}  // namespace zeropage::zero

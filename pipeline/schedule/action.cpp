#include "zeropage/schedule.h"

namespace zeropage::parallel {

std::string_view name(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return "forward";
    case ActionKind::kBackward:
      return "backward";
    case ActionKind::kInputGradient:
      return "input gradient";
    case ActionKind::kWeightGradient:
      return "weight gradient";
  }
  return "";
}

std::string describe(const Action& action, int chunks) {
  std::string words =
      std::string(name(action.kind)) + " of micro-batch " + std::to_string(action.micro_batch);
  if (chunks > 1) words += ", chunk " + std::to_string(action.chunk);
  return words;
}

}  // namespace zeropage::parallel

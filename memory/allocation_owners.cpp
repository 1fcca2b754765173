#include "memory/allocation_owners.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include <c10/util/StringUtil.h>

#include "zeropage/bytes.h"

namespace zeropage::memory {

void AllocationOwners::take(const void* block, int64_t bytes) {
  blocks_.insert_or_assign(block, Block{bytes, operator_label()});
}

std::string AllocationOwners::describe(size_t most) const {
  struct Sum {
    int64_t bytes = 0;
    int64_t count = 0;
  };
  std::map<std::string, Sum> sums;
  for (const auto& [block, held] : blocks_) {
    std::string who = memory::describe(held.label);
    if (who.empty()) who = "what no operator of a step made, such as the data";
    if (const std::string phase = name(held.label.phase); !phase.empty()) who += " in " + phase;
    Sum& sum = sums[who];
    sum.bytes += held.bytes;
    ++sum.count;
  }
  std::vector<std::pair<std::string, Sum>> largest(sums.begin(), sums.end());
  std::stable_sort(largest.begin(), largest.end(), [](const auto& left, const auto& right) {
    return left.second.bytes > right.second.bytes;
  });
  largest.resize(std::min(most, largest.size()));
  std::string text;
  for (const auto& [who, sum] : largest) {
    text += c10::str("  ", who, ": ", format_bytes(sum.bytes), " in ", sum.count, "\n");
  }
  return text;
}

std::string describe(const OperatorLabel& label) {
  if (*label.name == '\0') return "";
  if (*label.module == '\0') return label.name;
  return label.is_of_module ? c10::str(label.module, ": ", label.name)
                            : c10::str("after ", label.module, ": ", label.name);
}

std::string name(StepPhase phase) {
  switch (phase) {
    case StepPhase::kForward:
      return "forward";
    case StepPhase::kLoss:
      return "the loss";
    case StepPhase::kBackward:
      return "backward";
    case StepPhase::kOther:
      break;
  }
  return "";
}

}  // namespace zeropage::memory

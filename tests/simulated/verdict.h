// Whether a simulated run ended as it must: with the bits of the unbroken one, or with an error that one of its faults explains.
#pragma once

#include <string>

#include "tests/simulated/cluster.h"

namespace zeropage::simulated {

struct Verdict {
  enum class Is : uint8_t { kSameBits, kNamedError, kFailure };

  Is is = Is::kSameBits;
  std::string words;  // of an error or a failure
};

Verdict verdict_on(const RunPlan& plan, const Outcome& outcome);

}  // namespace zeropage::simulated

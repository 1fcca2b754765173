// What the measurements are expected to show, and whether they do.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/collectives/figures.h"

namespace collectives {

// A bound that one transport's times must keep against others'.
struct Claim {
  enum class Figure {
    kBandwidthRatio,  // of the transport's bandwidth to the other's, wanted at least `bound`
    kTimeRatio,       // of the times, wanted at most `bound`
  };

  std::string transport;
  // The quickest of them in each round is what the transport is compared with.
  std::vector<std::string> others;
  std::vector<Operation> operations;
  int64_t least_bytes = 0;
  int64_t most_bytes = 0;
  Figure figure = Figure::kTimeRatio;
  double bound = 0;

  std::string words() const;
};

// The claim at one case.
struct Finding {
  int ranks = 0;
  Case measured;
  Spread figure;  // against the quickest of the others
  // Against each of the others, in the claim's order.
  std::vector<Spread> against;
  bool holds = false;  // at the median
};

struct Verdict {
  Claim claim;
  std::vector<Finding> findings;  // where the transport and all others were measured

  // Unset where there is nothing to judge by.
  std::optional<bool> holds() const;
};

std::vector<Verdict> judge(const std::vector<Measurement>& all);

}  // namespace collectives

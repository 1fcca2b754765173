// A figure in every round, ratios within a round, and both as every --json file has them.
#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <vector>

#include <nlohmann/json.hpp>

#include "zeropage/check.h"

namespace bench {

struct Spread {
  std::vector<double> rounds;

  // REQUIRES of these: at least one round.
  double median() const {
    std::vector<double> sorted = rounds;
    std::sort(sorted.begin(), sorted.end());
    const size_t half = sorted.size() / 2;
    return sorted.size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  }
  double least() const { return *std::min_element(rounds.begin(), rounds.end()); }
  double most() const { return *std::max_element(rounds.begin(), rounds.end()); }
};

// Round by round.
inline Spread quotient(const Spread& numerator, const Spread& denominator) {
  TORCH_INTERNAL_ASSERT(numerator.rounds.size() == denominator.rounds.size(), "rounds differ");
  Spread ratios;
  std::transform(numerator.rounds.begin(), numerator.rounds.end(), denominator.rounds.begin(),
                 std::back_inserter(ratios.rounds), std::divides<>());
  return ratios;
}

inline nlohmann::json spread_json(const Spread& spread) {
  return {{"median", spread.median()},
          {"min", spread.least()},
          {"max", spread.most()},
          {"rounds", spread.rounds}};
}

}  // namespace bench

// The measured times and what is computed from them: spreads over rounds, ratios within a round.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/collectives/case.h"

namespace collectives {

// A figure in every round.
struct Spread {
  std::vector<double> rounds;

  // REQUIRES: at least one round.
  double median() const;
  double least() const;
  double most() const;
};

// One transport at one case.
struct Measurement {
  int ranks = 0;
  Case measured;
  std::string transport;
  Spread seconds;                   // of one operation
  std::vector<int64_t> iterations;  // that the time of a round is the mean of

  // Bytes of the whole tensor per second; 0 for a barrier.
  double bandwidth() const;
};

// The same case over another transport; null if it was not measured.
const Measurement* find(const std::vector<Measurement>& all, int ranks, const Case& measured,
                        const std::string& transport);

// Round by round. REQUIRES: as many rounds in both.
Spread quotient(const Spread& numerator, const Spread& denominator);
Spread least_of(const Spread& one, const Spread& other);

}  // namespace collectives

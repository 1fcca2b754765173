#include "bench/collectives/figures.h"

#include <algorithm>
#include <functional>

#include "memory/check.h"

namespace collectives {
namespace {

Spread by_round(const Spread& one, const Spread& other,
                const std::function<double(double, double)>& combine) {
  TORCH_INTERNAL_ASSERT(one.rounds.size() == other.rounds.size(), "rounds differ");
  Spread combined;
  std::transform(one.rounds.begin(), one.rounds.end(), other.rounds.begin(),
                 std::back_inserter(combined.rounds), combine);
  return combined;
}

}  // namespace

double Spread::median() const {
  std::vector<double> sorted = rounds;
  std::sort(sorted.begin(), sorted.end());
  const size_t half = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

double Spread::least() const {
  return *std::min_element(rounds.begin(), rounds.end());
}

double Spread::most() const {
  return *std::max_element(rounds.begin(), rounds.end());
}

double Measurement::bandwidth() const {
  return static_cast<double>(measured.bytes) / seconds.median();
}

const Measurement* find(const std::vector<Measurement>& all, int ranks, const Case& measured,
                        const std::string& transport) {
  const auto at = std::find_if(all.begin(), all.end(), [&](const Measurement& other) {
    return other.ranks == ranks && other.measured == measured && other.transport == transport;
  });
  return at == all.end() ? nullptr : &*at;
}

Spread quotient(const Spread& numerator, const Spread& denominator) {
  return by_round(numerator, denominator, std::divides<>());
}

Spread least_of(const Spread& one, const Spread& other) {
  return by_round(one, other, [](double a, double b) { return std::min(a, b); });
}

}  // namespace collectives

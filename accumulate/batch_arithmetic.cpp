#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zeropage/batches.h"
#include "zeropage/check.h"

namespace zeropage::accumulate {
namespace {

// Past it, looking for divisors one by one would take noticeable time.
constexpr int64_t kMostFactored = int64_t{1} << 40;

// The factors of the global batch, in the order in which what is undetermined becomes 1.
enum Factor : size_t { kRanks, kAccumulation, kMicroBatch };
constexpr std::array<std::string_view, 3> kFactorNames = {"ranks", "accumulation", "micro_batch"};
using Factors = std::array<std::optional<int64_t>, 3>;

void check_given(const BatchSizes& given) {
  const std::array<std::pair<std::string_view, std::optional<int64_t>>, 4> sizes = {
      {{"global_batch", given.global_batch},
       {"micro_batch", given.micro_batch},
       {"accumulation", given.accumulation},
       {"ranks", given.ranks}}};
  std::string names;
  int count = 0;
  for (const auto& [name, size] : sizes) {
    if (!size) continue;
    ZP_CHECK(*size >= 1, "solve_batch: ", name, ": expected 1 or more, got ", *size);
    names.append(name).append(" = ").append(std::to_string(*size));
    ++count;
  }
  ZP_CHECK(count >= 2,
           "solve_batch: expected at least two of global_batch, micro_batch, accumulation and "
           "ranks, got ",
           count == 0 ? "none" : "only " + names, "; give another one");
}

int64_t product(const Factors& factors) {
  int64_t result = 1;
  for (const auto& factor : factors) {
    ZP_CHECK(!__builtin_mul_overflow(result, factor.value_or(1), &result),
             "solve_batch: micro_batch ", factors[kMicroBatch].value_or(1), " * accumulation ",
             factors[kAccumulation].value_or(1), " * ranks ", factors[kRanks].value_or(1),
             " does not fit into 64 bits; give smaller ones");
  }
  return result;
}

std::string joined(const std::vector<std::string>& words, std::string_view between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : std::string(between)) + word;
  return text;
}

// The values nearest to `size`, below and above, that divide `whole`.
std::vector<std::string> nearest_divisors(int64_t whole, int64_t size) {
  int64_t below = 0;
  int64_t above = std::numeric_limits<int64_t>::max();
  const auto consider = [&](int64_t divisor) {
    if (divisor < size) below = std::max(below, divisor);
    if (divisor > size) above = std::min(above, divisor);
  };
  for (int64_t divisor = 1; divisor * divisor <= whole; ++divisor) {
    if (whole % divisor != 0) continue;
    consider(divisor);
    consider(whole / divisor);
  }
  std::vector<std::string> nearest;
  if (below > 0) nearest.push_back(std::to_string(below));
  if (above <= whole) nearest.push_back(std::to_string(above));
  return nearest;
}

// With this global batch, what each given factor could be instead: "micro_batch 2 or 5".
std::vector<std::string> other_factors(int64_t global_batch, const Factors& factors,
                                       bool all_given) {
  std::vector<std::string> changes;
  if (global_batch > kMostFactored) return changes;
  for (const size_t changed : {kMicroBatch, kAccumulation, kRanks}) {
    if (!factors[changed]) continue;
    const int64_t others = product(factors) / *factors[changed];
    if (global_batch % others != 0) continue;
    const int64_t rest = global_batch / others;
    const auto nearest = all_given ? std::vector<std::string>{std::to_string(rest)}
                                   : nearest_divisors(rest, *factors[changed]);
    changes.push_back(std::string(kFactorNames[changed]) + " " + joined(nearest, " or "));
  }
  return changes;
}

std::string other_global_batches(int64_t global_batch, int64_t unit, bool all_given) {
  if (all_given) return std::to_string(unit);
  std::vector<std::string> nearest;
  const int64_t below = global_batch / unit * unit;
  int64_t above = 0;
  if (below > 0) nearest.push_back(std::to_string(below));
  if (!__builtin_add_overflow(below, unit, &above)) nearest.push_back(std::to_string(above));
  return joined(nearest, " or ");
}

[[noreturn]] void refuse(int64_t global_batch, const Factors& factors) {
  const bool all_given = factors[kRanks] && factors[kAccumulation] && factors[kMicroBatch];
  const int64_t unit = product(factors);
  std::vector<std::string> given;
  for (const size_t factor : {kMicroBatch, kAccumulation, kRanks}) {
    if (factors[factor]) {
      given.push_back(std::string(kFactorNames[factor]) + " " + std::to_string(*factors[factor]));
    }
  }
  auto changes = other_factors(global_batch, factors, all_given);
  changes.insert(changes.begin(),
                 "global_batch " + other_global_batches(global_batch, unit, all_given));
  ZP_THROW("solve_batch: global_batch ", global_batch, " with ", joined(given, " * "),
           ": expected ", all_given ? "" : "a multiple of ", unit, "; nearest are ",
           joined(changes, ", or "));
}

}  // namespace

SolvedBatch solve_batch(const BatchSizes& given) {
  check_given(given);
  const Factors factors = {given.ranks, given.accumulation, given.micro_batch};
  const int64_t unit = product(factors);
  const int64_t global_batch = given.global_batch.value_or(unit);

  Factors solved = factors;
  const auto unknown = std::count(solved.begin(), solved.end(), std::nullopt);
  if (global_batch % unit != 0 || (unknown == 0 && global_batch != unit)) {
    refuse(global_batch, factors);
  }
  // The last one without a value takes what is left of the global batch; those before it are 1.
  int64_t left = global_batch / unit;
  for (size_t factor = solved.size(); factor-- > 0;) {
    if (solved[factor]) continue;
    solved[factor] = left;
    left = 1;
  }
  return {.global_batch = global_batch,
          .micro_batch = *solved[kMicroBatch],
          .accumulation = *solved[kAccumulation],
          .ranks = *solved[kRanks]};
}

}  // namespace zeropage::accumulate

#include "checkpointing/detail/savings_frontier.h"

#include <algorithm>
#include <limits>

namespace zeropage::checkpointing::detail {

SavingsFrontier::SavingsFrontier(const std::vector<ItemGroup>& groups, size_t most_states)
    : groups_(groups.size()), most_states_(most_states) {
  states_.push_back({});
  frontier_.push_back(0);
  for (size_t group = 0; group < groups.size(); ++group) {
    size_t left = groups[group].count;
    for (size_t count = 1; left > 0; count *= 2) {
      const size_t taken = std::min(count, left);
      add_bundle(group, taken, groups[group]);
      left -= taken;
    }
  }
}

void SavingsFrontier::add_bundle(size_t group, size_t count, const ItemGroup& item) {
  const int64_t more_bytes = item.bytes * static_cast<int64_t>(count);
  const double more_seconds = item.seconds * static_cast<double>(count);
  std::vector<size_t> merged;
  merged.reserve(2 * frontier_.size());
  // From the most bytes down, so that a state is dominated by what came before it.
  size_t without = frontier_.size();
  size_t with = frontier_.size();
  double least_seconds = std::numeric_limits<double>::infinity();
  while (without > 0 || with > 0) {
    bool take_with = without == 0;
    if (without > 0 && with > 0) {
      const State& kept = states_[frontier_[without - 1]];
      const State& base = states_[frontier_[with - 1]];
      const int64_t with_bytes = base.bytes + more_bytes;
      take_with = with_bytes > kept.bytes ||
                  (with_bytes == kept.bytes && base.seconds + more_seconds < kept.seconds);
    }
    const size_t before = frontier_[(take_with ? with : without) - 1];
    --(take_with ? with : without);
    const double seconds = states_[before].seconds + (take_with ? more_seconds : 0.0);
    if (seconds >= least_seconds) continue;
    least_seconds = seconds;
    if (take_with) {
      merged.push_back(states_.size());
      states_.push_back({states_[before].bytes + more_bytes, seconds, before, group, count});
    } else {
      merged.push_back(before);
    }
  }
  std::reverse(merged.begin(), merged.end());
  frontier_ = std::move(merged);
  if (frontier_.size() > most_states_) thin();
}

// Keeps the most bytes, and of each of most_states_ equal ranges the state that is farthest below
// the line through the range's ends: the best seconds for a byte, whatever is added later.
void SavingsFrontier::thin() {
  const int64_t width = bytes(size() - 1) / static_cast<int64_t>(most_states_) + 1;
  std::vector<size_t> kept;
  kept.reserve(most_states_ + 1);
  for (size_t begin = 0; begin + 1 < size();) {
    size_t end = begin + 1;
    while (end + 1 < size() && bytes(end) / width == bytes(begin) / width) ++end;
    const double slope =
        (seconds(end) - seconds(begin)) / static_cast<double>(bytes(end) - bytes(begin));
    const auto above_line = [&](size_t at) {
      return seconds(at) - slope * static_cast<double>(bytes(at));
    };
    size_t best = begin;
    for (size_t at = begin + 1; at < end; ++at) {
      if (above_line(at) < above_line(best)) best = at;
    }
    kept.push_back(frontier_[best]);
    begin = end;
  }
  kept.push_back(frontier_.back());
  frontier_ = std::move(kept);
}

std::optional<size_t> SavingsFrontier::at_least(int64_t bytes) const {
  const auto found =
      std::lower_bound(frontier_.begin(), frontier_.end(), bytes,
                       [&](size_t state, int64_t wanted) { return states_[state].bytes < wanted; });
  if (found == frontier_.end()) return std::nullopt;
  return static_cast<size_t>(found - frontier_.begin());
}

std::vector<size_t> SavingsFrontier::counts(size_t at) const {
  std::vector<size_t> counts(groups_, 0);
  for (size_t state = frontier_[at]; states_[state].count > 0; state = states_[state].before) {
    counts[states_[state].group] += states_[state].count;
  }
  return counts;
}

}  // namespace zeropage::checkpointing::detail

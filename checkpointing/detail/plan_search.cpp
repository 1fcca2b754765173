#include "checkpointing/detail/plan_search.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <numeric>
#include <string_view>
#include <tuple>
#include <utility>

#include "checkpointing/detail/savings_frontier.h"

namespace zeropage::checkpointing::detail {
namespace {

// What a simulation takes is proportional to the length of the step; so much of it is some tens of
// milliseconds.
constexpr size_t kMostWork = 8'000'000;
constexpr size_t kFewestRuns = 200;
constexpr size_t kMostRuns = 4000;
constexpr size_t kMostEnumerationWork = 4'000'000;
// A knapsack takes its groups times its states: of the one without anchors, which sets the bound, and
// of each other.
constexpr size_t kBoundWork = 1'500'000;
constexpr size_t kAnchoredWork = 100'000;
constexpr size_t kFewestStates = 64;
constexpr size_t kMostStates = 2048;
// Requirements asked of the knapsack for one set of anchors.
constexpr int kMostRequirements = 24;
// So near the knapsack's bound, other anchors are not worth their time.
constexpr double kNearBound = 0.02;
constexpr size_t kImprovedCandidates = 4;
constexpr size_t kLoweredCandidates = 4;
// So few items leave simulations to spare: the set with the least peak is improved too.
constexpr size_t kFewItems = 64;
// Sums of the same seconds in another order are not an improvement.
constexpr double kCheaperBy = 1e-9;

size_t length(const RecordedStep& step) {
  return 1 + step.ticks.size() + step.operators.size() + step.values.size();
}

}  // namespace

PlanSearch::PlanSearch(const StepGraph& graph, ReplaySimulator& simulator, int64_t budget_bytes,
                       const PlanOptions& options)
    : graph_(graph), simulator_(simulator), budget_bytes_(budget_bytes), items_(find_items(graph)) {
  group_items();
  enumerates_ = small_enough_to_enumerate(options);
  most_runs_ = std::clamp(kMostWork / length(graph.step()), kFewestRuns, kMostRuns);
  lowering_runs_ = most_runs_ / (2 * kLoweredCandidates);
}

void PlanSearch::group_items() {
  std::map<std::tuple<std::string_view, int64_t, double>, size_t> known;
  for (size_t at = 0; at < items_.size(); ++at) {
    const Item& item = items_[at];
    const std::string_view signature = graph_.step().operators[item.op].signature;
    const auto [found, is_new] =
        known.try_emplace({signature, item.bytes, item.seconds}, groups_.size());
    if (is_new) groups_.push_back({.bytes = item.bytes, .seconds = item.seconds, .items = {}});
    groups_[found->second].items.push_back(at);
  }
  by_seconds_.resize(groups_.size());
  std::iota(by_seconds_.begin(), by_seconds_.end(), size_t{0});
  by_byte_seconds_ = by_seconds_;
  std::stable_sort(by_seconds_.begin(), by_seconds_.end(), [&](size_t one, size_t other) {
    return groups_[one].seconds > groups_[other].seconds;
  });
  const auto byte_seconds = [&](size_t group) {
    return groups_[group].seconds / static_cast<double>(std::max<int64_t>(groups_[group].bytes, 1));
  };
  std::stable_sort(by_byte_seconds_.begin(), by_byte_seconds_.end(), [&](size_t one, size_t other) {
    return byte_seconds(one) < byte_seconds(other);
  });
}

bool PlanSearch::small_enough_to_enumerate(const PlanOptions& options) const {
  if (items_.size() > options.exhaustive_items || items_.size() >= 30) return false;
  return (size_t{1} << items_.size()) * length(graph_.step()) <= kMostEnumerationWork;
}

PlanSearch::Candidate PlanSearch::evaluated(ItemSet dropped) {
  Decision decision(graph_.step().values.size(), 0);
  for (size_t at = 0; at < items_.size(); ++at) {
    if (dropped[at] == 0) continue;
    for (const size_t value : items_[at].values) decision[value] = 1;
  }
  return {.dropped = std::move(dropped), .outcome = simulator_.run(decision)};
}

bool PlanSearch::fits(const Candidate& candidate) const {
  return candidate.outcome.peak_bytes <= budget_bytes_;
}

bool PlanSearch::cheaper(const Candidate& one, const Candidate& other) {
  return one.outcome.replay_seconds < other.outcome.replay_seconds * (1 - kCheaperBy);
}

PlanSearch::Found PlanSearch::find() {
  Candidate best = evaluated(ItemSet(items_.size(), 0));
  kept_peak_bytes_ = best.outcome.peak_bytes;
  if (!fits(best) && enumerates_) best = enumerate();
  if (!fits(best) && !enumerates_) {
    const auto anchors = anchor_sets(graph_, items_);
    std::vector<Candidate> candidates;
    double least_seconds = std::numeric_limits<double>::infinity();
    for (const ItemSet& kept : anchors) {
      auto filled = fill(kept, least_seconds);
      if (!filled) continue;
      least_seconds = std::min(least_seconds, filled->outcome.replay_seconds);
      candidates.push_back(std::move(*filled));
      if (least_seconds <= bound_seconds_ * (1 + kNearBound)) break;
    }
    if (candidates.empty() || items_.size() <= kFewItems) {
      most_runs_ += simulator_.runs();
      candidates.push_back(least_peak(anchors));
    }
    std::stable_sort(candidates.begin(), candidates.end(), [](const auto& one, const auto& other) {
      return one.outcome.replay_seconds < other.outcome.replay_seconds;
    });
    candidates.resize(std::min(candidates.size(), kImprovedCandidates));
    best = candidates.front();
    for (Candidate& candidate : candidates) {
      if (!fits(candidate)) continue;
      improve(candidate);
      if (!fits(best) || cheaper(candidate, best)) best = candidate;
    }
  }
  Found found{.dropped = Decision(graph_.step().values.size(), 0),
              .outcome = best.outcome,
              .fits = fits(best)};
  for (size_t at = 0; at < items_.size(); ++at) {
    for (const size_t value : items_[at].values) found.dropped[value] = best.dropped[at];
  }
  return found;
}

// The cheapest that fits; where none does, the one with the least peak.
PlanSearch::Candidate PlanSearch::enumerate() {
  std::optional<Candidate> best;
  for (size_t mask = 0; mask < size_t{1} << items_.size(); ++mask) {
    ItemSet dropped(items_.size(), 0);
    for (size_t at = 0; at < items_.size(); ++at) dropped[at] = (mask >> at) & 1;
    Candidate candidate = evaluated(std::move(dropped));
    const bool is_cheaper = best && fits(candidate) && cheaper(candidate, *best);
    const bool is_lower =
        best && !fits(*best) && candidate.outcome.peak_bytes < best->outcome.peak_bytes;
    if (!best || is_cheaper || is_lower) best = std::move(candidate);
  }
  return *best;
}

// The knapsack's cheapest set without the anchors that fits, if it is cheaper than so many seconds.
std::optional<PlanSearch::Candidate> PlanSearch::fill(const ItemSet& anchors,
                                                      double below_seconds) {
  std::vector<ItemGroup> free;
  for (const Group& group : groups_) {
    const auto count = std::count_if(group.items.begin(), group.items.end(),
                                     [&](size_t item) { return anchors[item] == 0; });
    free.push_back({group.bytes, group.seconds, static_cast<size_t>(count)});
  }
  const size_t work = bound_seconds_ < 0 ? kBoundWork : kAnchoredWork;
  const SavingsFrontier frontier(
      free, std::clamp(work / (groups_.size() + 1), kFewestStates, kMostStates));
  const size_t last = frontier.size() - 1;
  int64_t required_bytes = kept_peak_bytes_ - budget_bytes_;
  // The first set of anchors is empty: where replays are free of side effects, nothing is cheaper.
  if (bound_seconds_ < 0) {
    bound_seconds_ = frontier.seconds(frontier.at_least(required_bytes).value_or(last));
  }
  for (int attempt = 1; attempt <= kMostRequirements; ++attempt) {
    const bool is_last = attempt == kMostRequirements;
    const size_t at = is_last ? last : frontier.at_least(required_bytes).value_or(last);
    if (frontier.seconds(at) >= below_seconds || !may_run()) return std::nullopt;
    Candidate candidate = evaluated(earliest(frontier.counts(at), anchors));
    if (fits(candidate)) return candidate;
    if (at == last) return std::nullopt;
    // Nothing that saves less than what is missing would fit; where that is little again and again,
    // greater strides.
    const int64_t missing_bytes = candidate.outcome.peak_bytes - budget_bytes_;
    const int64_t stride = attempt > kMostRequirements / 2 ? frontier.bytes(last) / 16 : 1;
    required_bytes = frontier.bytes(at) + std::max(missing_bytes, stride);
  }
  return std::nullopt;
}

// Among items that are alike the earliest: their replays come late in backward, when much has been
// released.
ItemSet PlanSearch::earliest(const std::vector<size_t>& counts, const ItemSet& anchors) const {
  ItemSet dropped(items_.size(), 0);
  for (size_t group = 0; group < groups_.size(); ++group) {
    size_t left = counts[group];
    for (const size_t item : groups_[group].items) {
      if (left == 0) break;
      if (anchors[item] != 0) continue;
      dropped[item] = 1;
      --left;
    }
  }
  return dropped;
}

// Depends on the step alone, so that the budget which a refusal names is accepted.
PlanSearch::Candidate PlanSearch::least_peak(const std::vector<ItemSet>& anchors) {
  std::vector<Candidate> starts = {evaluated(ItemSet(items_.size(), 0))};
  for (const ItemSet& kept : anchors) {
    ItemSet dropped(items_.size());
    for (size_t at = 0; at < items_.size(); ++at) dropped[at] = kept[at] == 0 ? 1 : 0;
    starts.push_back(evaluated(std::move(dropped)));
  }
  const auto lower = [](const Candidate& one, const Candidate& other) {
    return one.outcome.peak_bytes < other.outcome.peak_bytes;
  };
  std::stable_sort(starts.begin(), starts.end(), lower);
  starts.resize(std::min(starts.size(), kLoweredCandidates));
  for (Candidate& start : starts) lower_peak(start, lowering_runs_);
  return *std::min_element(starts.begin(), starts.end(), lower);
}

// Flips items one by one, then two by two, as long as that lowers the peak.
void PlanSearch::lower_peak(Candidate& best, size_t runs) {
  const size_t end = simulator_.runs() + runs;
  const auto flip = [&](size_t one, size_t other) {
    ItemSet flipped = best.dropped;
    flipped[one] ^= 1;
    if (other != one) flipped[other] ^= 1;
    Candidate candidate = evaluated(std::move(flipped));
    if (candidate.outcome.peak_bytes >= best.outcome.peak_bytes) return false;
    best = std::move(candidate);
    return true;
  };
  // The distance between the two; a lower peak starts over at single items.
  for (size_t distance = 0; distance < items_.size(); ++distance) {
    for (size_t one = 0; one + distance < items_.size(); ++one) {
      if (simulator_.runs() == end) return;
      if (flip(one, one + distance)) distance = 0;
    }
  }
}

void PlanSearch::improve(Candidate& best) {
  keep_costliest(best, groups_.size());
  while (may_run() && (keep_one_more(best) || drop_one_more(best))) {
    keep_costliest(best, groups_.size());
  }
}

std::optional<size_t> PlanSearch::member(const ItemSet& dropped, size_t group, bool is_dropped,
                                         End end) const {
  const std::vector<size_t>& items = groups_[group].items;
  const auto matches = [&](size_t item) { return (dropped[item] != 0) == is_dropped; };
  if (end == End::kEarliest) {
    const auto found = std::find_if(items.begin(), items.end(), matches);
    return found == items.end() ? std::nullopt : std::optional(*found);
  }
  const auto found = std::find_if(items.rbegin(), items.rend(), matches);
  return found == items.rend() ? std::nullopt : std::optional(*found);
}

// Keeps what it can of what is dropped, the costliest first; what does not fit yet may not fit after.
void PlanSearch::keep_costliest(Candidate& best, size_t except_group) {
  for (const size_t group : by_seconds_) {
    if (group == except_group || groups_[group].seconds == 0) continue;
    bool found = true;
    while (found) {
      found = false;
      for (const End end : {End::kLatest, End::kEarliest}) {
        const auto item = member(best.dropped, group, true, end);
        if (!item || !may_run()) break;
        ItemSet dropped = best.dropped;
        dropped[*item] = 0;
        Candidate candidate = evaluated(std::move(dropped));
        if (!fits(candidate) || !cheaper(candidate, best)) continue;
        best = std::move(candidate);
        found = true;
        break;
      }
    }
  }
}

// Drops one more item of some group, and keeps what that makes room for.
bool PlanSearch::drop_one_more(Candidate& best) {
  for (const size_t group : by_byte_seconds_) {
    for (const End end : {End::kEarliest, End::kLatest}) {
      const auto item = member(best.dropped, group, false, end);
      if (!item || !may_run()) break;
      Candidate candidate = best;
      candidate.dropped[*item] = 1;
      candidate = evaluated(std::move(candidate.dropped));
      keep_costliest(candidate, group);
      if (!fits(candidate) || !cheaper(candidate, best)) continue;
      best = std::move(candidate);
      return true;
    }
  }
  return false;
}

// Keeps one more item of some group, and drops a cheaper one of another in its place.
bool PlanSearch::keep_one_more(Candidate& best) {
  for (const size_t group : by_seconds_) {
    if (groups_[group].seconds == 0) continue;
    for (const End end : {End::kLatest, End::kEarliest}) {
      const auto item = member(best.dropped, group, true, end);
      if (!item || !may_run()) break;
      Candidate without = best;
      without.dropped[*item] = 0;
      if (replace(best, without, group)) return true;
    }
  }
  return false;
}

// The first that fits of `without` and one more dropped item of another group.
bool PlanSearch::replace(Candidate& best, const Candidate& without, size_t group) {
  for (const size_t other : by_byte_seconds_) {
    if (other == group || groups_[other].seconds >= groups_[group].seconds) continue;
    for (const End end : {End::kEarliest, End::kLatest}) {
      const auto item = member(without.dropped, other, false, end);
      if (!item || !may_run()) break;
      ItemSet dropped = without.dropped;
      dropped[*item] = 1;
      Candidate candidate = evaluated(std::move(dropped));
      if (!fits(candidate) || !cheaper(candidate, best)) continue;
      best = std::move(candidate);
      return true;
    }
  }
  return false;
}

}  // namespace zeropage::checkpointing::detail

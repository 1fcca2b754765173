#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <unordered_map>

#include "zeropage/profile.h"

namespace zeropage::profile {

Moment begin_of(const StepProfile& step, uint8_t account) {
  Moment moment;
  moment.by_kind = step.before[account];
  moment.total = std::accumulate(moment.by_kind.begin(), moment.by_kind.end(), int64_t{0});
  return moment;
}

Moment peak_of(const StepProfile& step, uint8_t account) {
  Moment peak = begin_of(step, account);
  walk(step, account, [&](const Moment& moment) {
    if (moment.total > peak.total) peak = moment;
  });
  return peak;
}

std::vector<Moment> sampled(const StepProfile& step, uint8_t account, size_t most) {
  std::vector<Moment> moments;
  const int64_t stretch_ns =
      std::max<int64_t>(1, step.duration_ns / static_cast<int64_t>(std::max<size_t>(most, 1)) + 1);
  int64_t stretch = -1;
  walk(step, account, [&](const Moment& moment) {
    const int64_t at = std::max<int64_t>(moment.time_ns, 0) / stretch_ns;
    if (at != stretch) {
      stretch = at;
      moments.push_back(moment);
    } else if (moment.total >= moments.back().total) {
      moments.back() = moment;
    }
  });
  return moments;
}

std::vector<Holder> holders_at_peak(const RankProfile& rank, const StepProfile& step,
                                    uint8_t account) {
  const int64_t peak_ns = peak_of(step, account).time_ns;
  std::unordered_map<uint64_t, Change> live;
  int64_t total = begin_of(step, account).total;
  const int64_t peak = peak_of(step, account).total;
  for (const Change& change : step.changes) {
    if (change.account != account || change.time_ns > peak_ns || total == peak) continue;
    if (!change.is_rename()) total += change.bytes;
    if (change.block == 0) continue;
    if (change.bytes < 0) {
      live.erase(change.block);
    } else {
      live[change.block] = change;
    }
  }
  std::map<std::tuple<uint8_t, NameIndex, NameIndex>, Holder> sums;
  for (const auto& [block, change] : live) {
    Holder& sum = sums[{change.kind, change.owner, change.page}];
    sum.kind = change.kind;
    sum.owner = rank.names[change.owner];
    sum.page = rank.names[change.page];
    sum.bytes += change.bytes;
    ++sum.blocks;
  }
  std::vector<Holder> holders;
  for (auto& [key, sum] : sums) holders.push_back(std::move(sum));
  std::stable_sort(holders.begin(), holders.end(),
                   [](const Holder& a, const Holder& b) { return a.bytes > b.bytes; });
  return holders;
}

}  // namespace zeropage::profile

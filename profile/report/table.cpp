#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include <tuple>

#include "zeropage/profile.h"

namespace zeropage::profile {
namespace {

using HolderKey = std::tuple<std::string, std::string, std::string>;  // kind, owner, page

std::map<HolderKey, int64_t> bytes_by_holder(const Profile& profile) {
  std::map<HolderKey, int64_t> bytes;
  const RankProfile* rank = rank_of_peak(profile);
  if (rank == nullptr) return bytes;
  const StepProfile& step = *step_of_peak(*rank, profile.device);
  std::vector<int64_t> others = peak_of(step, profile.device).by_kind;
  for (const Holder& holder : holders_at_peak(*rank, step, profile.device)) {
    bytes[{profile.kinds[holder.kind], holder.owner, holder.page}] += holder.bytes;
    others[holder.kind] -= holder.bytes;
  }
  for (size_t kind = 0; kind < others.size(); ++kind) {
    if (others[kind] != 0)
      bytes[{profile.kinds[kind], "before the recorded steps", ""}] += others[kind];
  }
  return bytes;
}

RankRow row_of(const Profile& profile, const RankProfile& rank) {
  RankRow row;
  row.rank = rank.rank;
  const StepProfile* peak_step = step_of_peak(rank, profile.device);
  if (peak_step == nullptr) {
    row.held.resize(profile.kinds.size());
    row.at_peak.resize(profile.kinds.size());
    return row;
  }
  const Moment peak = peak_of(*peak_step, profile.device);
  row.at_peak = peak.by_kind;
  row.peak = peak.total;
  row.peak_step = peak_step->step;
  walk(rank.steps.back(), profile.device, [&](const Moment& moment) { row.held = moment.by_kind; });
  for (const StepProfile& step : rank.steps) {
    row.mean_step_ns += step.duration_ns;
    row.mean_wait_ns += waited_ns(waits_of(rank, step));
  }
  const auto steps = static_cast<int64_t>(rank.steps.size());
  row.mean_step_ns /= steps;
  row.mean_wait_ns /= steps;
  return row;
}

}  // namespace

const StepProfile* step_of_peak(const RankProfile& rank, uint8_t account) {
  const StepProfile* highest = nullptr;
  int64_t peak = -1;
  for (const StepProfile& step : rank.steps) {
    const int64_t total = peak_of(step, account).total;
    if (total <= peak) continue;
    peak = total;
    highest = &step;
  }
  return highest;
}

const RankProfile* rank_of_peak(const Profile& profile) {
  const RankProfile* highest = nullptr;
  int64_t peak = -1;
  for (const RankProfile& rank : profile.ranks) {
    const StepProfile* step = step_of_peak(rank, profile.device);
    if (step == nullptr) continue;
    const int64_t total = peak_of(*step, profile.device).total;
    if (total <= peak) continue;
    peak = total;
    highest = &rank;
  }
  return highest;
}

std::vector<RankRow> rows_of(const Profile& profile) {
  std::vector<RankRow> rows;
  for (const RankProfile& rank : profile.ranks) rows.push_back(row_of(profile, rank));
  return rows;
}

std::vector<size_t> kinds_in_use(const Profile& profile) {
  std::vector<bool> is_used(profile.kinds.size());
  for (const RankProfile& rank : profile.ranks) {
    for (size_t kind = 0; kind < rank.formula.size(); ++kind) {
      is_used[kind] = is_used[kind] || rank.formula[kind] != 0;
    }
    for (const StepProfile& step : rank.steps) {
      for (const auto& bytes : step.before) {
        for (size_t kind = 0; kind < bytes.size(); ++kind) {
          is_used[kind] = is_used[kind] || bytes[kind] != 0;
        }
      }
      for (const Change& change : step.changes) is_used[change.kind] = true;
    }
  }
  std::vector<size_t> kinds;
  for (size_t kind = 0; kind < is_used.size(); ++kind) {
    if (is_used[kind]) kinds.push_back(kind);
  }
  return kinds;
}

std::vector<HolderDifference> difference(const Profile& profile, const Profile& other) {
  std::map<HolderKey, HolderDifference> rows;
  const auto row_at = [&](const HolderKey& key) -> HolderDifference& {
    HolderDifference& row = rows[key];
    std::tie(row.kind, row.owner, row.page) = key;
    return row;
  };
  for (const auto& [key, bytes] : bytes_by_holder(profile)) row_at(key).bytes = bytes;
  for (const auto& [key, bytes] : bytes_by_holder(other)) row_at(key).other_bytes = bytes;
  std::vector<HolderDifference> result;
  for (auto& [key, row] : rows) {
    if (row.bytes != row.other_bytes) result.push_back(std::move(row));
  }
  std::stable_sort(result.begin(), result.end(),
                   [](const HolderDifference& a, const HolderDifference& b) {
                     return std::abs(a.other_bytes - a.bytes) > std::abs(b.other_bytes - b.bytes);
                   });
  return result;
}

}  // namespace zeropage::profile

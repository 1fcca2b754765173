#include "profile/report/page_data.h"

#include <algorithm>
#include <numeric>

#include <nlohmann/json.hpp>

#include "profile/report/growth.h"
#include "profile/report/page_lanes.h"
#include "zeropage/profile.h"

namespace zeropage::profile {
namespace {

using Json = nlohmann::json;

constexpr size_t kHoldersOfTable = 14;
constexpr size_t kMostGrowths = 12;
constexpr size_t kMostStepRows = 64;

// Microseconds are finer than a screen.
int64_t microseconds(int64_t ns) {
  return ns / 1000;
}

// Differences from moment to moment are short numbers: [time, phase, bytes of each kind in use].
Json moments_json(const StepProfile& step, uint8_t account, const std::vector<size_t>& kinds,
                  size_t most) {
  Json rows = Json::array();
  std::vector<int64_t> before(kinds.size() + 1);
  for (const Moment& moment : sampled(step, account, most)) {
    Json row = Json::array();
    const int64_t time = microseconds(moment.time_ns);
    row.push_back(time - std::exchange(before[kinds.size()], time));
    row.push_back(static_cast<int>(moment.phase));
    for (size_t index = 0; index < kinds.size(); ++index) {
      const int64_t bytes = moment.by_kind[kinds[index]];
      row.push_back(bytes - std::exchange(before[index], bytes));
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

Json peak_json(const Profile& profile, const RankProfile& rank, const StepProfile& step,
               uint8_t account) {
  const Moment peak = peak_of(step, account);
  Json holders = Json::array();
  const std::vector<Holder> all = holders_at_peak(rank, step, account);
  for (size_t index = 0; index < std::min(all.size(), kHoldersOfTable); ++index) {
    const Holder& holder = all[index];
    holders.push_back(
        {profile.kinds[holder.kind], holder.owner, holder.page, holder.bytes, holder.blocks});
  }
  return {{"time", microseconds(peak.time_ns)},
          {"total", peak.total},
          {"kinds", peak.by_kind},
          {"phase", name(peak.phase)},
          {"holders", std::move(holders)},
          {"all_holders", all.size()}};
}

Json accounts_json(const Profile& profile, const RankProfile& rank, const StepProfile& step,
                   const std::vector<size_t>& kinds, size_t moments) {
  Json accounts = Json::array();
  for (size_t index = 0; index < profile.accounts.size(); ++index) {
    const auto account = static_cast<uint8_t>(index);
    if (account != profile.device && peak_of(step, account).total == 0) continue;
    accounts.push_back({{"name", profile.accounts[index]},
                        {"device", account == profile.device},
                        {"moments", moments_json(step, account, kinds, moments)},
                        {"peak", peak_json(profile, rank, step, account)}});
  }
  // The device that trains is shown first.
  std::stable_partition(accounts.begin(), accounts.end(),
                        [](const Json& account) { return account["device"].get<bool>(); });
  return accounts;
}

Json lanes_json(const std::vector<PageLane>& all, size_t most) {
  Json lanes = Json::array();
  for (const PageLane& lane : all) {
    if (lanes.size() == most) break;
    Json stretches = Json::array();
    for (const PageStretch& stretch : lane.stretches) {
      if (stretch.state == PageState::kSharded) continue;
      const int64_t begin = microseconds(stretch.begin_ns);
      stretches.push_back({static_cast<int>(stretch.state), begin,
                           std::max<int64_t>(1, microseconds(stretch.end_ns) - begin)});
    }
    lanes.push_back({{"page", lane.page}, {"bytes", lane.bytes}, {"stretches", stretches}});
  }
  return lanes;
}

// Phases, collectives, copies and waits; of the code's other ranges there are too many to see.
std::vector<SpanRecord> shown_spans(const RankProfile& rank, const StepProfile& step) {
  std::vector<SpanRecord> spans;
  for (const SpanRecord& span : step.spans) {
    const std::string& title = rank.names[span.name];
    const bool is_phase = title == "forward" || title == "step";
    if (span.what == SpanRecord::What::kRange && !is_phase) continue;
    if (span.what == SpanRecord::What::kWait && !span.on_training_thread) continue;
    spans.push_back(span);
  }
  return spans;
}

// The longest of them.
Json spans_json(const RankProfile& rank, std::vector<SpanRecord> spans, size_t most) {
  if (spans.size() > most) {
    std::nth_element(spans.begin(), spans.begin() + static_cast<int64_t>(most), spans.end(),
                     [](const SpanRecord& a, const SpanRecord& b) {
                       return a.end_ns - a.begin_ns > b.end_ns - b.begin_ns;
                     });
    spans.resize(most);
  }
  Json rows = Json::array();
  for (const SpanRecord& span : spans) {
    const int64_t begin = microseconds(span.begin_ns);
    rows.push_back({static_cast<int>(span.what), begin, microseconds(span.end_ns) - begin,
                    rank.names[span.name], rank.names[span.of], span.bytes});
  }
  return rows;
}

Json step_json(const Profile& profile, const RankProfile& rank, const StepProfile& step,
               const std::vector<size_t>& kinds, const PageDetail& detail) {
  const std::vector<PageLane> lanes = page_lanes(rank, step);
  const std::vector<SpanRecord> spans = shown_spans(rank, step);
  return {{"step", step.step},
          {"label", step.label},
          {"duration", microseconds(step.duration_ns)},
          {"accounts", accounts_json(profile, rank, step, kinds, detail.moments)},
          {"lanes", lanes_json(lanes, detail.lanes)},
          {"all_lanes", lanes.size()},
          {"spans", spans_json(rank, spans, detail.spans)},
          {"all_spans", spans.size()},
          {"sentences", wait_sentences(rank, step)}};
}

// The ranks whose peaks are highest, in order of their numbers.
std::vector<const RankProfile*> drawn_ranks(const Profile& profile, size_t most) {
  std::vector<std::pair<int64_t, const RankProfile*>> ranks;
  for (const RankProfile& rank : profile.ranks) {
    const StepProfile* step = step_of_peak(rank, profile.device);
    if (step != nullptr) ranks.emplace_back(peak_of(*step, profile.device).total, &rank);
  }
  std::stable_sort(ranks.begin(), ranks.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  ranks.resize(std::min(ranks.size(), most));
  std::sort(ranks.begin(), ranks.end(),
            [](const auto& a, const auto& b) { return a.second->rank < b.second->rank; });
  std::vector<const RankProfile*> drawn;
  for (const auto& [peak, rank] : ranks) drawn.push_back(rank);
  return drawn;
}

Json ranks_json(const Profile& profile, const std::vector<size_t>& kinds,
                const PageDetail& detail) {
  Json ranks = Json::array();
  for (const RankProfile* rank : drawn_ranks(profile, detail.ranks)) {
    Json steps = Json::array();
    const size_t first = rank->steps.size() - std::min(rank->steps.size(), detail.steps);
    for (size_t index = first; index < rank->steps.size(); ++index) {
      steps.push_back(step_json(profile, *rank, rank->steps[index], kinds, detail));
    }
    ranks.push_back({{"rank", rank->rank},
                     {"recorded", rank->steps.size()},
                     {"first", rank->steps.front().step},
                     {"steps", std::move(steps)}});
  }
  return ranks;
}

Json table_json(const Profile& profile, const PageDetail& detail) {
  Json rows = Json::array();
  for (const RankRow& row : rows_of(profile)) {
    if (rows.size() == 4 * detail.ranks) break;
    rows.push_back({{"rank", row.rank},
                    {"held", row.held},
                    {"peak", row.at_peak},
                    {"total", row.peak},
                    {"step", row.peak_step},
                    {"step_time", microseconds(row.mean_step_ns)},
                    {"wait_time", microseconds(row.mean_wait_ns)}});
  }
  return rows;
}

// The rows of the rank with the highest peak.
Json by_step_json(const Profile& profile, const RankProfile& rank) {
  Json rows = Json::array();
  for (const StepProfile& step : rank.steps) {
    if (rows.size() == kMostStepRows) break;
    const Moment peak = peak_of(step, profile.device);
    rows.push_back({{"step", step.step},
                    {"label", step.label},
                    {"total", peak.total},
                    {"kinds", peak.by_kind},
                    {"phase", name(peak.phase)},
                    {"time", microseconds(step.duration_ns)},
                    {"wait", microseconds(waited_ns(waits_of(rank, step)))}});
  }
  return rows;
}

Json run_json(const Profile& profile, const PageDetail& detail) {
  const std::vector<size_t> kinds = kinds_in_use(profile);
  const RankProfile* highest = rank_of_peak(profile);
  Json facts = Json::array();
  for (const auto& [what, value] : profile.facts) facts.push_back({what, value});
  return {{"title", profile.title},
          {"facts", std::move(facts)},
          {"kind_names", profile.kinds},
          {"kinds", kinds},
          {"device", profile.accounts[profile.device]},
          {"rank_count", profile.ranks.size()},
          {"peak_rank", highest == nullptr ? 0 : highest->rank},
          {"peak_step", highest == nullptr ? 0 : step_of_peak(*highest, profile.device)->step},
          {"formula", profile.ranks.front().formula},
          {"table", table_json(profile, detail)},
          {"step_count", highest == nullptr ? 0 : highest->steps.size()},
          {"by_step", highest == nullptr ? Json::array() : by_step_json(profile, *highest)},
          {"ranks", ranks_json(profile, kinds, detail)}};
}

}  // namespace

bool PageDetail::halve() {
  constexpr size_t kFewestMoments = 60;
  if (moments > kFewestMoments) {
    moments /= 2;
    spans = std::max<size_t>(60, spans / 2);
    lanes = std::max<size_t>(40, lanes / 2);
    return true;
  }
  if (ranks == 1 && steps == 1) return false;
  ranks = std::max<size_t>(1, ranks / 2);
  steps = std::max<size_t>(1, steps / 2);
  return true;
}

std::string page_data(const Profile& profile, const Profile* other, const PageDetail& detail) {
  Json data = {{"run", run_json(profile, detail)}};
  Json growths = Json::array();
  const std::vector<Growth> all_growths = growth_of(profile);
  for (const Growth& growth : all_growths) {
    if (growths.size() < kMostGrowths) growths.push_back(growth.to_string());
  }
  data["growth"] = std::move(growths);
  data["all_growths"] = all_growths.size();
  if (other != nullptr) {
    data["other"] = run_json(*other, detail);
    Json rows = Json::array();
    const std::vector<HolderDifference> all = difference(profile, *other);
    for (const HolderDifference& row : all) {
      if (rows.size() == kHoldersOfTable) break;
      rows.push_back({row.kind, row.owner, row.page, row.bytes, row.other_bytes});
    }
    data["difference"] = std::move(rows);
    data["all_differences"] = all.size();
  }
  return data.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace zeropage::profile

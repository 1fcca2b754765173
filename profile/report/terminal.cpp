#include "profile/report/terminal.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <sstream>

#include "profile/report/growth.h"
#include "zeropage/bytes.h"
#include "zeropage/profile.h"

namespace zeropage::profile {
namespace {

constexpr size_t kColumns = 60;
constexpr size_t kMostHolders = 8;
constexpr size_t kRanksOfTable = 6;

using memory::format_bytes;

std::string padded(std::string text, size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

std::string right(const std::string& text, size_t width) {
  return std::string(width - std::min(width, text.size()), ' ') + text;
}

std::string difference_of(int64_t bytes, int64_t other) {
  return (other < bytes ? "-" : "+") + format_bytes(std::abs(other - bytes));
}

// The values at the moments of `columns` equal stretches: the moment of each that is highest in all.
std::vector<Moment> by_column(const StepProfile& step, uint8_t account) {
  const std::vector<Moment> moments = sampled(step, account, kColumns);
  std::vector<Moment> columns;
  for (size_t column = 0; column < kColumns; ++column) {
    const int64_t end_ns = step.duration_ns * static_cast<int64_t>(column + 1) / kColumns;
    const Moment* at = &moments.front();
    for (const Moment& moment : moments) {
      if (moment.time_ns <= end_ns) at = &moment;
    }
    columns.push_back(*at);
  }
  return columns;
}

void write_lines(std::ostream& out, const Profile& profile, const RankProfile& rank,
                 const StepProfile& step) {
  const Moment peak = peak_of(step, profile.device);
  out << "Bytes on the " << profile.accounts[profile.device] << " of rank " << rank.rank
      << " over step " << step.step << (step.label.empty() ? "" : ", " + step.label) << " ("
      << format_ns(step.duration_ns) << "); the peak, " << format_bytes(peak.total) << ", is at "
      << format_ns(peak.time_ns) << ", in its " << name(peak.phase) << "\n";
  const std::vector<Moment> columns = by_column(step, profile.device);
  const auto line = [&](const std::string& title, auto value) {
    std::vector<int64_t> values;
    for (const Moment& moment : columns) values.push_back(value(moment));
    const int64_t most = *std::max_element(values.begin(), values.end());
    if (most <= 0) return;
    out << "  " << padded(title, 21) << sparkline(values, most) << "  up to " << format_bytes(most)
        << "\n";
  };
  line("total", [](const Moment& moment) { return moment.total; });
  for (const size_t kind : kinds_in_use(profile)) {
    line(profile.kinds[kind], [kind](const Moment& moment) { return moment.by_kind[kind]; });
  }
  out << "\nWho holds what was allocated within the step, at the peak:\n";
  const std::vector<Holder> holders = holders_at_peak(rank, step, profile.device);
  for (size_t index = 0; index < std::min(holders.size(), kMostHolders); ++index) {
    const Holder& holder = holders[index];
    out << "  " << right(format_bytes(holder.bytes), 10) << "  "
        << padded(profile.kinds[holder.kind], 21)
        << (holder.owner.empty() ? "(outside of operators)" : holder.owner);
    if (!holder.page.empty()) out << " of page \"" << holder.page << "\"";
    out << ", " << holder.blocks << (holder.blocks == 1 ? " block\n" : " blocks\n");
  }
}

void write_table(std::ostream& out, const Profile& profile, const Profile* other) {
  const std::vector<RankRow> rows = rows_of(profile);
  const size_t ranks = std::min(rows.size(), kRanksOfTable);
  const std::vector<int64_t>& formula = profile.ranks.front().formula;
  out << padded("at the peak", 23);
  for (size_t rank = 0; rank < ranks; ++rank) {
    out << right("rank " + std::to_string(rows[rank].rank), 12);
  }
  if (!formula.empty()) out << right("held", 12) << right("formula", 12);
  if (other != nullptr) out << right("other run", 14) << right("change", 14);
  out << "\n";
  const std::vector<RankRow> others = other == nullptr ? std::vector<RankRow>() : rows_of(*other);
  const auto other_bytes = [&](const std::string& kind) {
    const auto at = std::find(other->kinds.begin(), other->kinds.end(), kind);
    if (others.empty() || at == other->kinds.end()) return int64_t{0};
    return others.front().at_peak[static_cast<size_t>(at - other->kinds.begin())];
  };
  for (const size_t kind : kinds_in_use(profile)) {
    out << padded("  " + profile.kinds[kind], 23);
    for (size_t rank = 0; rank < ranks; ++rank) {
      out << right(format_bytes(rows[rank].at_peak[kind]), 12);
    }
    if (!formula.empty()) {
      out << right(format_bytes(rows.front().held[kind]), 12)
          << right(formula[kind] == 0 ? "-" : format_bytes(formula[kind]), 12);
    }
    if (other != nullptr) {
      const int64_t bytes = other_bytes(profile.kinds[kind]);
      out << right(format_bytes(bytes), 14)
          << right(difference_of(rows.front().at_peak[kind], bytes), 14);
    }
    out << "\n";
  }
  out << padded("  total", 23);
  for (size_t rank = 0; rank < ranks; ++rank) out << right(format_bytes(rows[rank].peak), 12);
  if (!formula.empty()) out << right("", 24);
  if (other != nullptr && !others.empty()) {
    out << right(format_bytes(others.front().peak), 14)
        << right(difference_of(rows.front().peak, others.front().peak), 14);
  }
  out << "\n";
  if (rows.size() > ranks) out << "  and " << rows.size() - ranks << " ranks more\n";
}

void write_difference(std::ostream& out, const Profile& profile, const Profile& other) {
  out << "\nAgainst \"" << other.title << "\", what differs most at the peaks:\n";
  const std::vector<HolderDifference> rows = difference(profile, other);
  if (rows.empty()) out << "  nothing\n";
  for (size_t index = 0; index < std::min(rows.size(), kMostHolders); ++index) {
    const HolderDifference& row = rows[index];
    out << "  " << right(difference_of(row.bytes, row.other_bytes), 12) << "  "
        << padded(row.kind, 21) << (row.owner.empty() ? "(outside of operators)" : row.owner);
    if (!row.page.empty()) out << " of page \"" << row.page << "\"";
    out << ": " << format_bytes(row.bytes) << ", there " << format_bytes(row.other_bytes) << "\n";
  }
}

}  // namespace

std::string sparkline(const std::vector<int64_t>& values, int64_t most) {
  static constexpr std::array<const char*, 8> kBlocks = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  std::string text;
  for (const int64_t value : values) {
    const int64_t height =
        most <= 0 ? 0 : std::clamp<int64_t>((value * 8 + most - 1) / most, 1, 8) - 1;
    text += kBlocks[static_cast<size_t>(height)];
  }
  return text;
}

std::string terminal_report(const Profile& profile, const Profile* other) {
  std::ostringstream out;
  out << profile.title << "\n";
  for (const auto& [what, value] : profile.facts) out << "  " << what << ": " << value << "\n";
  const RankProfile* rank = rank_of_peak(profile);
  if (rank == nullptr) {
    out << "No step was recorded: the steps that were chosen did not come\n";
    return out.str();
  }
  const StepProfile& step = *step_of_peak(*rank, profile.device);
  out << "\n";
  write_lines(out, profile, *rank, step);
  out << "\n";
  write_table(out, profile, other);
  out << "\n";
  for (const std::string& sentence : wait_sentences(*rank, step)) out << sentence << "\n";
  for (const Growth& growth : growth_of(profile)) out << "Growth: " << growth.to_string() << "\n";
  if (other != nullptr && rank_of_peak(*other) != nullptr) write_difference(out, profile, *other);
  return out.str();
}

}  // namespace zeropage::profile

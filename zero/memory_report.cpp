#include "zeropage/memory_report.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <sstream>

#include <c10/util/Exception.h>

#include "zeropage/bytes.h"
#include "zeropage/ledger.h"

namespace zeropage {
namespace {

using memory::Breakdown;
using memory::kKindCount;
using memory::Ledger;
using memory::MemoryColumn;
using memory::MemoryRow;

// Columns that fit a terminal of 100 columns beside the labels.
constexpr size_t kMostColumns = 6;

constexpr std::array<Breakdown RankMemory::*, 5> kBreakdowns = {
    &RankMemory::held, &RankMemory::at_peak, &RankMemory::on_host, &RankMemory::in_host_tier,
    &RankMemory::in_nvme_tier};
constexpr std::array<int64_t RankMemory::*, 2> kFigures = {&RankMemory::resident_bytes,
                                                           &RankMemory::peak_resident_bytes};
RankMemory own_memory(c10::DeviceType device) {
  const Ledger& ledger = *Ledger::current();
  RankMemory own{.held = ledger.now(device),
                 .at_peak = ledger.at_peak(device),
                 .on_host = {},
                 .in_host_tier = ledger.offloaded(memory::Tier::kHost),
                 .in_nvme_tier = ledger.offloaded(memory::Tier::kNvme),
                 .resident_bytes = memory::resident_bytes(),
                 .peak_resident_bytes = memory::peak_resident_bytes()};
  // The kernel gathers the highest figure late, and other threads may have let memory go between the two readings.
  own.peak_resident_bytes = std::max(own.peak_resident_bytes, own.resident_bytes);
  if (device != c10::kCPU) own.on_host = ledger.now(c10::kCPU);
  return own;
}

std::string text_of(const RankMemory& rank) {
  std::ostringstream out;
  for (const auto breakdown : kBreakdowns) {
    for (const int64_t bytes : (rank.*breakdown).bytes) out << bytes << ' ';
  }
  for (const auto figure : kFigures) out << rank.*figure << ' ';
  return out.str();
}

RankMemory read_from(const std::string& text) {
  std::istringstream in(text);
  RankMemory rank;
  for (const auto breakdown : kBreakdowns) {
    for (int64_t& bytes : (rank.*breakdown).bytes) in >> bytes;
  }
  for (const auto figure : kFigures) in >> rank.*figure;
  TORCH_INTERNAL_ASSERT(in, "ranks of one build write as many figures");
  return rank;
}

// In the order of ranks; where there are too many, those whose totals were highest.
std::vector<size_t> shown_ranks(const std::vector<RankMemory>& ranks) {
  std::vector<size_t> shown(ranks.size());
  std::iota(shown.begin(), shown.end(), size_t{0});
  if (shown.size() <= kMostColumns) return shown;
  std::stable_sort(shown.begin(), shown.end(), [&](size_t left, size_t right) {
    return ranks[left].at_peak.total() > ranks[right].at_peak.total();
  });
  shown.resize(kMostColumns);
  std::sort(shown.begin(), shown.end());
  return shown;
}

// Adds a row for the shown ranks; nothing where no rank has any and `always` does not ask for it.
template <typename BytesOf>
void add_row(std::vector<MemoryRow>& rows, const std::string& label,
             const std::vector<RankMemory>& ranks, const std::vector<size_t>& shown,
             BytesOf bytes_of, bool always) {
  MemoryRow row{label, {}};
  for (const size_t rank : shown) row.bytes.push_back(bytes_of(ranks[rank]));
  const bool is_empty =
      std::all_of(row.bytes.begin(), row.bytes.end(), [](int64_t bytes) { return bytes == 0; });
  if (always || !is_empty) rows.push_back(std::move(row));
}

}  // namespace

bool operator==(const RankMemory& left, const RankMemory& right) {
  return std::all_of(kBreakdowns.begin(), kBreakdowns.end(),
                     [&](auto of) { return (left.*of).bytes == (right.*of).bytes; }) &&
         std::all_of(kFigures.begin(), kFigures.end(),
                     [&](auto of) { return left.*of == right.*of; });
}

std::string MemoryReport::to_string() const {
  const std::vector<size_t> shown = shown_ranks(ranks);
  std::vector<MemoryColumn> columns;
  for (const size_t rank : shown) {
    const Breakdown& held = ranks[rank].held;
    columns.push_back({"rank " + std::to_string(rank), held, held.persistent()});
  }
  std::vector<MemoryRow> rows;
  const auto add = [&](const std::string& label, auto bytes_of, bool always) {
    add_row(rows, label, ranks, shown, bytes_of, always);
  };
  const std::string on = c10::DeviceTypeName(device, /*lower_case=*/true);
  add(
      "highest total", [](const RankMemory& of) { return of.at_peak.total(); }, true);
  add(
      "on the host besides", [](const RankMemory& of) { return of.on_host.total(); }, false);
  add(
      "offloaded to the host", [](const RankMemory& of) { return of.in_host_tier.total(); }, false);
  add(
      "offloaded to nvme", [](const RankMemory& of) { return of.in_nvme_tier.total(); }, false);
  add(
      "resident", [](const RankMemory& of) { return of.resident_bytes; }, true);
  add(
      "highest resident", [](const RankMemory& of) { return of.peak_resident_bytes; }, true);
  std::string text = c10::str("memory held on ", on, ", by kind (", ranks.size(),
                              ranks.size() == 1 ? " rank)\n" : " ranks)\n") +
                     memory::memory_table(columns, std::nullopt, rows);
  if (shown.size() < ranks.size()) {
    int64_t least = ranks[shown.front()].at_peak.total();
    for (const RankMemory& rank : ranks) least = std::min(least, rank.at_peak.total());
    text += c10::str("(the ", shown.size(), " ranks with the highest totals; the least of the ",
                     ranks.size(), " ranks is ", memory::format_bytes(least), ")\n");
  }
  return text;
}

std::ostream& operator<<(std::ostream& out, const MemoryReport& report) {
  return out << report.to_string();
}

MemoryReport memory_report(const comm::World& world) {
  MemoryReport report{.device = world.device().type(), .ranks = {}};
  const std::string own = text_of(own_memory(report.device));
  for (const std::string& rank : world.gather_text("memory_report()", own)) {
    report.ranks.push_back(read_from(rank));
  }
  return report;
}

}  // namespace zeropage

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <vector>

#include "zeropage/bytes.h"
#include "zeropage/ledger.h"

namespace zeropage::memory {
namespace {

constexpr int kLabelWidth = 24;
constexpr int kCellWidth = 12;

void write_row(std::ostream& out, std::string_view label, const std::vector<std::string>& cells) {
  out << std::left << std::setw(kLabelWidth) << label << std::right;
  for (const std::string& cell : cells) out << std::setw(kCellWidth) << cell;
  out << '\n';
}

}  // namespace

std::string memory_table(std::span<const MemoryColumn> columns,
                         const std::optional<MemoryColumn>& formula,
                         std::span<const MemoryRow> rows) {
  std::ostringstream out;
  std::vector<std::string> cells;
  for (const MemoryColumn& column : columns) cells.push_back(column.title);
  if (formula) cells.push_back(formula->title);
  write_row(out, "", cells);

  const auto add_row = [&](std::string_view label, auto&& value_of, bool has_formula) {
    cells.clear();
    for (const MemoryColumn& column : columns) cells.push_back(format_bytes(value_of(column)));
    if (formula) cells.push_back(has_formula ? format_bytes(value_of(*formula)) : "-");
    write_row(out, label, cells);
  };
  for (size_t index = 0; index < kKindCount; ++index) {
    const auto kind = static_cast<Kind>(index);
    const auto value_of = [kind](const MemoryColumn& column) { return column.breakdown[kind]; };
    const bool empty = std::all_of(columns.begin(), columns.end(), [&](const MemoryColumn& column) {
      return column.breakdown[kind] == 0;
    });
    if (empty && (!formula || formula->breakdown[kind] == 0)) continue;
    Breakdown only_this_kind;
    only_this_kind[kind] = 1;
    add_row(name(kind), value_of, only_this_kind.persistent() == 1);
  }
  add_row(
      "persistent", [](const MemoryColumn& column) { return column.persistent_bytes; }, true);
  add_row(
      "total", [](const MemoryColumn& column) { return column.breakdown.total(); }, false);
  for (const MemoryRow& row : rows) {
    cells.clear();
    for (const int64_t bytes : row.bytes) cells.push_back(format_bytes(bytes));
    if (formula) cells.emplace_back("-");
    write_row(out, row.label, cells);
  }
  return out.str();
}

}  // namespace zeropage::memory

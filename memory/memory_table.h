// The ledger's table, for people: a row a kind, a column a rank, the formula beside it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory/ledger.h"

namespace zeropage::memory {

struct MemoryColumn {
  std::string title;    // "rank 0"
  Breakdown breakdown;  // bytes
  // The bytes among them that live from step to step. The breakdown cannot tell: a parameter that
  // is whole only while an operator uses it has the same kind.
  int64_t persistent_bytes = 0;
};

// A row behind the kinds, as of bytes that the ledger does not know.
struct MemoryRow {
  std::string label;
  std::vector<int64_t> bytes;  // by column
};

// Rows of kinds that no column has are left out; "persistent", "total" and then `rows` close the table.
// `formula` is the last column, with "-" where no formula speaks: of activations, and so of the
// total. None: no such column.
std::string memory_table(std::span<const MemoryColumn> columns,
                         const std::optional<MemoryColumn>& formula = std::nullopt,
                         std::span<const MemoryRow> rows = {});

}  // namespace zeropage::memory

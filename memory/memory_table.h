// The ledger's table, for people: a row a kind, a column a rank, the formula beside it.
#pragma once

#include <span>
#include <string>

#include "memory/ledger.h"

namespace zeropage::memory {

struct MemoryColumn {
  std::string title;    // "rank 0"
  Breakdown breakdown;  // bytes
};

// Rows of kinds that no column has are left out; "persistent" and "total" close the table.
// `formula` is the last column, with "-" where no formula speaks: of activations, and so of the
// total.
std::string memory_table(std::span<const MemoryColumn> columns, const MemoryColumn& formula);

}  // namespace zeropage::memory

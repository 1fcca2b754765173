// Rows on their way to the ranks that have their experts, and back.
//
// Operators, for what parallel/rank_operators.h says. Ranks tell each other first how many rows they will give, and compare by a stamp
// behind those numbers that they are at the same layer. Then each pair of ranks exchanges rows, one partner after the other, and a pair without
// rows sends nothing.
//
// Threads, errors: as parallel/rank_operators.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zeropage/detail/slices.h"

namespace zeropage::parallel::experts {

// load: [experts], int64: this rank's rows of each expert, of all ranks. Returns [ranks, experts / ranks], int64, on the host: the rows
// that each rank has for each expert of this one. Waits for a device. Without values on the meta device.
at::Tensor exchange_loads(const at::Tensor& load, const RanksPointer& ranks,
                          const std::string& name);

// How many rows go to each rank, and come from it.
struct RowsOfRanks {
  std::vector<int64_t> given;
  std::vector<int64_t> received;

  RowsOfRanks back() const { return {received, given}; }
};

// rows: [sum of given, width], by the rank that they go to. Returns [sum of received, width], by the rank that they come from. With a gradient,
// which goes back the same way.
at::Tensor exchange_rows(const at::Tensor& rows, const RowsOfRanks& numbers,
                         const RanksPointer& ranks, const std::string& name);

}  // namespace zeropage::parallel::experts

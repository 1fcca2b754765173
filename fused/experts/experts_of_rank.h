// What one rank's experts do to rows, and which rows come to them from other ranks.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/TensorBody.h>

#include "fused/experts/expert_linear.h"
#include "fused/experts/token_copies.h"
#include "parallel/experts/row_exchange.h"

namespace zeropage::fused {

// [experts, ...], as ExpertsImpl has them.
struct ExpertMatrices {
  at::Tensor up;
  at::Tensor gate;  // undefined for kGelu
  at::Tensor down;
};

// rows: [n, d_model], sorted by expert, of the dtype in which products are made. Returns the same sizes; zeros for rows without an expert.
at::Tensor by_experts(const ExpertMatrices& matrices, const at::Tensor& rows, const ExpertRows& of);

// Rows of all ranks for this one's experts.
struct ArrivingRows {
  parallel::experts::RowsOfRanks numbers;
  int64_t sent;     // the sum of those that this rank gives
  CopyOrder order;  // from the rows by rank, in which they come, to rows by expert
  ExpertRows rows;
};

// load: [experts], int64: this rank's rows for each expert of all ranks. most: rows that this rank has, some of which may have no expert. Where
// tensors have no values, all experts are taken to get as many rows. Collective. Waits for a device.
ArrivingRows arriving_rows(const at::Tensor& load, int64_t most,
                           const parallel::RanksPointer& ranks, const std::string& name);

}  // namespace zeropage::fused

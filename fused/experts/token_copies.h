// Copies of tokens, one for each expert that a token takes, on their way to the experts and back.
#pragma once

#include <cstdint>

#include <ATen/core/TensorBody.h>

namespace zeropage::fused {

// Copy c is of token c / active. Sorted, it is row `row_of_copy[c]`; row r is copy `copy_of_row[r]`. All int64, [tokens * active].
struct CopyOrder {
  at::Tensor copy_of_row;
  at::Tensor row_of_copy;
  int64_t active;  // copies of each token
};

// Copies sorted by `keys`, [copies], int64; what is alike stays in order.
CopyOrder sorted_by(const at::Tensor& keys, int64_t active);
// What undoes an order of one copy a token.
inline CopyOrder inverse(const CopyOrder& order) {
  return {.copy_of_row = order.row_of_copy, .row_of_copy = order.copy_of_row, .active = 1};
}

// Both are operators with a gradient. They gather and add in an order of their own, the copies of a token one after the other, and so
// to the same bits on any number of threads.

// tokens: [tokens, width]. Returns their copies, sorted: [tokens * active, width].
at::Tensor copies_of_tokens(const at::Tensor& tokens, const CopyOrder& order);
// Each token's sum of its copies by their weights. rows: [tokens * active, width]; weights: fp32, or fp64 for fp64, [tokens, active].
// Returns [tokens, width] of the rows' dtype, added up in the weights' and rounded once.
at::Tensor sum_of_copies(const at::Tensor& rows, const at::Tensor& weights, const CopyOrder& order);

}  // namespace zeropage::fused

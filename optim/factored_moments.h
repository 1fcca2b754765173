// Second moments of a matrix by its rows and columns (Shazeer and Stern 2018, arXiv:1804.04235, section 3), of a gradient that
// ranks have parts of:
//
//   raise_to_magnitudes()   the largest magnitude of each row and column     all-reduced, maximum
//   windows_of()            what squares of a row or column are rounded to
//   add_squares()           sums of the rounded squares                      all-reduced, sum
//   FactoredMoments::take() moments of rows and columns, from the sums
//   divide_by_roots()       gradient / sqrt(row column / mean)
//
// The bits do not depend on the parts, the number of ranks, the threads, or the device. For that a square is rounded to a multiple of a
// unit, which is so large against the bound on the row's sum that double has all of the sum's bits: additions are exact
// then, in any order (Demmel and Nguyen 2013). A unit is at most 2^-50 of count largest^2, so a mean of n squares is within
// n^2 2^-51 of itself, and of 2^-27 for n = 4096; the roundings of n random squares cancel.
//
// The matrices are the last two dimensions of a tensor, contiguous; those before them are a batch.
// Threads: any; the CPU's loops are parallel (optim/parallel.h). Tensors of the meta device are let through.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "optim/cpu/instructions.h"

namespace zeropage::optim {

struct FactoredShape {
  int64_t batches = 1;
  int64_t rows = 1;
  int64_t columns = 1;

  // Rows over all matrices, and columns. Arrays below have the rows first.
  int64_t all_rows() const { return batches * rows; }
  int64_t all_columns() const { return batches * columns; }
  int64_t sums() const { return all_rows() + all_columns(); }
};

// REQUIRES: two dimensions or more, and elements.
FactoredShape factored_shape(at::IntArrayRef sizes);

// fp32, each rounded once, which LibTorch's own of fp32 are not on the host.
at::Tensor square_roots(const at::Tensor& numbers);

// The loops are for the host; the operators are LibTorch's, for any device.
enum class FactoredBy : uint8_t { kLoops, kOperators };

// Elements of the matrices that lie one after the other.
struct FactoredPart {
  at::Tensor gradient;  // flat: fp32, bf16 or fp16
  float scale = 1;      // gradients are multiplied by it, in fp32, first of all
  int64_t first = 0;    // the place of the first one
  FactoredShape shape;
  // What the loops may use; the bits are the same.
  optim::cpu::Instructions instructions = optim::cpu::Instructions::kAvx512;
  // kLoops: on the host.
  FactoredBy by = FactoredBy::kLoops;

  bool has_loops() const { return by == FactoredBy::kLoops && gradient.is_cpu(); }
};

// magnitudes: fp32 [sums()], of the gradient's device.
void raise_to_magnitudes(const FactoredPart& part, const at::Tensor& magnitudes);

// fp64 [sums()], of the largest magnitudes.
at::Tensor windows_of(const FactoredShape& shape, const at::Tensor& magnitudes);

// sums: fp64 [sums()].
void add_squares(const FactoredPart& part, const at::Tensor& windows, const at::Tensor& sums);

// The moments of a parameter from step to step: zeros at first.
struct FactoredMoments {
  FactoredShape shape;
  at::Tensor rows;     // fp32 [all_rows()]
  at::Tensor columns;  // fp32 [all_columns()]

  // moment = (1 - rate) moment + rate mean, where sums are those of add_squares(), over all of the tensor.
  void take(const at::Tensor& sums, double rate) const;

  // directions = gradient / sqrt(max(row column / max(mean of rows, floor), floor^2)), flat, fp32.
  void divide_by_roots(const FactoredPart& part, double floor, const at::Tensor& directions) const;
};

}  // namespace zeropage::optim

// The loops of optim/factored_moments.h over a part of some matrices, on the host. Free of torch.
//
// Sums are made of numbers that were rounded to a multiple of a unit, so that each addition is exact: their order, and so the
// parts, the threads and the instructions, do not matter.
//
// Threads: any, each with rows and columns of its own.
#pragma once

#include <cstdint>

#include "optim/cpu/instructions.h"
#include "optim/flat_stretch.h"

namespace zeropage::optim::cpu {

// Elements of matrices [batches, rows, columns], one after the other.
struct MatrixPart {
  int64_t first = 0;  // the place of its first element in them
  int64_t numel = 0;
  int64_t rows = 1;  // of a matrix
  int64_t columns = 1;
  // The row and the column that element 0 of the arrays below is of; both are counted over all matrices.
  int64_t first_row = 0;
  int64_t first_column = 0;
};

// The part's elements, which are multiplied by the scale, in fp32, first of all.
struct PartGradient {
  const void* elements = nullptr;
  Precision precision = Precision::kFloat;
  float scale = 1;
};

// Raises what rows and columns have to the largest magnitude among their elements. A NaN is larger than all.
void raise_to_magnitudes(const PartGradient& gradient, const MatrixPart& part, float* rows,
                         float* columns, Instructions instructions);

// Adds the squares, each rounded twice: to the window of its row for the row's sum, and to that of its column.
struct FactoredSums {
  double* rows = nullptr;
  double* columns = nullptr;
  const double* row_windows = nullptr;
  const double* column_windows = nullptr;
};
void add_squares(const PartGradient& gradient, const MatrixPart& part, const FactoredSums& sums,
                 Instructions instructions);

// directions = gradient / sqrt(max(row column, floor))
struct FactoredRoots {
  const float* rows = nullptr;
  const float* columns = nullptr;
  float floor = 0;
};
void divide_by_roots(const PartGradient& gradient, const MatrixPart& part,
                     const FactoredRoots& roots, float* directions, Instructions instructions);

}  // namespace zeropage::optim::cpu

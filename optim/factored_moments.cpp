#include "optim/factored_moments.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <vector>

#include <ATen/ATen.h>

#include "optim/cpu/factored_squares.h"
#include "optim/flat_tensor.h"
#include "optim/parallel.h"
#include "zeropage/check.h"

namespace zeropage::optim {
namespace {

// The least that is worth a thread with rows and columns of its own.
constexpr int64_t kNumelPerThread = 65536;
// Elements of which a device's operators have temporaries at once.
constexpr int64_t kNumelAtOnce = int64_t{1} << 22;

struct Extent {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t numel() const { return end - begin; }
};

// Elements [first, first + numel) of the matrices, by the rows and the columns that they are in.
Extent rows_of(const FactoredShape& shape, int64_t first, int64_t numel) {
  return {first / shape.columns, (first + numel - 1) / shape.columns + 1};
}

Extent columns_of(const FactoredShape& shape, int64_t first, int64_t numel) {
  const int64_t matrix = shape.rows * shape.columns;
  return {first / matrix * shape.columns, ((first + numel - 1) / matrix + 1) * shape.columns};
}

// The two halves of an array of sums.
at::Tensor rows_of(const FactoredShape& shape, const at::Tensor& sums) {
  return sums.narrow(0, 0, shape.all_rows());
}

at::Tensor columns_of(const FactoredShape& shape, const at::Tensor& sums) {
  return sums.narrow(0, shape.all_rows(), shape.all_columns());
}

optim::cpu::PartGradient gradient_of(const FactoredPart& part, int64_t begin) {
  const at::Tensor from = part.gradient.narrow(0, begin, part.gradient.numel() - begin);
  return {.elements = from.const_data_ptr(),
          .precision = precision_of({"factored moments", "gradient"}, part.gradient),
          .scale = part.scale};
}

optim::cpu::MatrixPart elements_of(const FactoredPart& part, int64_t begin, int64_t end,
                                   int64_t first_row = 0, int64_t first_column = 0) {
  return {.first = part.first + begin,
          .numel = end - begin,
          .rows = part.shape.rows,
          .columns = part.shape.columns,
          .first_row = first_row,
          .first_column = first_column};
}

// Calls run(elements, rows, columns) for disjoint elements of the part. Rows and columns are zeros of the thread's own, which
// merge(own, shared) then takes into those of `shared`, an array of sums.
template <typename Number, typename Run, typename Merge>
void for_each_thread(const FactoredPart& part, const at::Tensor& shared, const Run& run,
                     const Merge& merge) {
  std::mutex mutex;
  auto* const all = shared.mutable_data_ptr<Number>();
  parallel_for(part.gradient.numel(), kNumelPerThread, [&](int64_t begin, int64_t end) {
    const Extent rows = rows_of(part.shape, part.first + begin, end - begin);
    const Extent columns = columns_of(part.shape, part.first + begin, end - begin);
    std::vector<Number> own_rows(static_cast<size_t>(rows.numel()));
    std::vector<Number> own_columns(static_cast<size_t>(columns.numel()));
    run(elements_of(part, begin, end, rows.begin, columns.begin), gradient_of(part, begin),
        own_rows.data(), own_columns.data());
    const std::scoped_lock lock(mutex);
    merge(own_rows, all + rows.begin);
    merge(own_columns, all + part.shape.all_rows() + columns.begin);
  });
}

void raise_by_loops(const FactoredPart& part, const at::Tensor& magnitudes) {
  for_each_thread<float>(
      part, magnitudes,
      [&](const optim::cpu::MatrixPart& elements, const optim::cpu::PartGradient& gradient,
          float* rows, float* columns) {
        optim::cpu::raise_to_magnitudes(gradient, elements, rows, columns, part.instructions);
      },
      [](const std::vector<float>& own, float* shared) {
        // A NaN stays where it is, and takes the place of a number.
        for (size_t i = 0; i < own.size(); ++i) {
          if (!(own[i] <= shared[i])) shared[i] = own[i];
        }
      });
}

void add_by_loops(const FactoredPart& part, const at::Tensor& windows, const at::Tensor& sums) {
  const auto* const of_rows = windows.const_data_ptr<double>();
  const double* const of_columns = of_rows + part.shape.all_rows();
  for_each_thread<double>(
      part, sums,
      [&](const optim::cpu::MatrixPart& elements, const optim::cpu::PartGradient& gradient,
          double* rows, double* columns) {
        optim::cpu::add_squares(gradient, elements,
                                {.rows = rows,
                                 .columns = columns,
                                 .row_windows = of_rows + elements.first_row,
                                 .column_windows = of_columns + elements.first_column},
                                part.instructions);
      },
      [](const std::vector<double>& own, double* shared) {
        for (size_t i = 0; i < own.size(); ++i) shared[i] += own[i];
      });
}

void divide_by_loops(const FactoredPart& part, const at::Tensor& rows, const at::Tensor& columns,
                     float floor, const at::Tensor& directions) {
  const optim::cpu::FactoredRoots roots{.rows = rows.const_data_ptr<float>(),
                                        .columns = columns.const_data_ptr<float>(),
                                        .floor = floor};
  auto* const out = directions.mutable_data_ptr<float>();
  parallel_for(part.gradient.numel(), kNumelPerThread, [&](int64_t begin, int64_t end) {
    optim::cpu::divide_by_roots(gradient_of(part, begin), elements_of(part, begin, end), roots,
                                out + begin, part.instructions);
  });
}

// Elements of the part that are a block of matrices, of rows or of columns: [batches, rows, columns].
struct Block {
  int64_t begin = 0;  // in the part
  Extent batches;
  Extent rows;
  Extent columns;

  int64_t numel() const { return batches.numel() * rows.numel() * columns.numel(); }
  at::Tensor shaped(const at::Tensor& flat) const {
    return flat.narrow(0, begin, numel()).view({batches.numel(), rows.numel(), columns.numel()});
  }
  // [batches, rows, 1] and [batches, 1, columns] of the two halves of an array of sums.
  at::Tensor of_rows(const FactoredShape& shape, const at::Tensor& all) const {
    return all.view({shape.batches, shape.rows, 1})
        .narrow(0, batches.begin, batches.numel())
        .narrow(1, rows.begin, rows.numel());
  }
  at::Tensor of_columns(const FactoredShape& shape, const at::Tensor& all) const {
    return all.view({shape.batches, 1, shape.columns})
        .narrow(0, batches.begin, batches.numel())
        .narrow(2, columns.begin, columns.numel());
  }
};

// The next elements of the part, from `begin` on: of a row that has no beginning or no end here, of whole rows of a matrix, or
// of whole matrices.
Block block_at(const FactoredPart& part, int64_t begin) {
  const FactoredShape& shape = part.shape;
  const int64_t left = part.gradient.numel() - begin;
  const int64_t matrix = shape.rows * shape.columns;
  const int64_t place = part.first + begin;
  const int64_t batch = place / matrix;
  const int64_t row = place % matrix / shape.columns;
  const int64_t column = place % shape.columns;
  Block block{.begin = begin,
              .batches = {batch, batch + 1},
              .rows = {row, row + 1},
              .columns = {column, shape.columns}};
  if (column > 0 || left < shape.columns) {
    block.columns.end = std::min(shape.columns, column + left);
  } else if (row > 0 || left < matrix || matrix > kNumelAtOnce) {
    const int64_t rows = std::max<int64_t>(1, std::min(left, kNumelAtOnce) / shape.columns);
    block.rows.end = std::min(shape.rows, row + rows);
  } else {
    block.rows.end = shape.rows;
    block.batches.end = batch + std::max<int64_t>(1, std::min(left, kNumelAtOnce) / matrix);
  }
  return block;
}

template <typename Visit>
void for_each_block(const FactoredPart& part, const Visit& visit) {
  for (int64_t begin = 0; begin < part.gradient.numel();) {
    const Block block = block_at(part, begin);
    visit(block, block.shaped(part.gradient).to(at::kFloat).mul(part.scale));
    begin += block.numel();
  }
}

void raise_by_operators(const FactoredPart& part, const at::Tensor& magnitudes) {
  for_each_block(part, [&](const Block& block, const at::Tensor& gradient) {
    const at::Tensor magnitude = gradient.abs();
    at::Tensor rows = block.of_rows(part.shape, rows_of(part.shape, magnitudes));
    at::Tensor columns = block.of_columns(part.shape, columns_of(part.shape, magnitudes));
    rows.copy_(at::maximum(rows, magnitude.amax(2, /*keepdim=*/true)));
    columns.copy_(at::maximum(columns, magnitude.amax(1, /*keepdim=*/true)));
  });
}

void add_by_operators(const FactoredPart& part, const at::Tensor& windows, const at::Tensor& sums) {
  for_each_block(part, [&](const Block& block, const at::Tensor& gradient) {
    const at::Tensor squares = gradient.to(at::kDouble).square();
    const auto add = [&](const at::Tensor& window, at::Tensor to, int64_t over) {
      to.add_(squares.add(window).sub_(window).sum(over, /*keepdim=*/true));
    };
    add(block.of_rows(part.shape, rows_of(part.shape, windows)),
        block.of_rows(part.shape, rows_of(part.shape, sums)), 2);
    add(block.of_columns(part.shape, columns_of(part.shape, windows)),
        block.of_columns(part.shape, columns_of(part.shape, sums)), 1);
  });
}

void divide_by_operators(const FactoredPart& part, const at::Tensor& rows,
                         const at::Tensor& columns, float floor, const at::Tensor& directions) {
  for_each_block(part, [&](const Block& block, const at::Tensor& gradient) {
    const at::Tensor moments =
        block.of_rows(part.shape, rows).mul(block.of_columns(part.shape, columns));
    block.shaped(directions).copy_(gradient.div(square_roots(moments.clamp_min_(floor))));
  });
}

// A window for numbers whose sum, in magnitude, is at most the bound: 1.5 2^k, where 2^(k-1) is above it. A number that is added to it, and from
// which it is subtracted, is rounded to a multiple of 2^(k-52), and sums of such are below 2^(k+1).
at::Tensor windows_for(const at::Tensor& bounds) {
  constexpr int64_t kMantissaBits = 52;
  constexpr int64_t kUnit = int64_t{1} << kMantissaBits;
  const at::Tensor exponents = bounds.view(at::kLong).bitwise_right_shift(kMantissaBits);
  const at::Tensor windows = exponents.add(2).mul(kUnit).add(kUnit / 2).view(at::kDouble);
  return windows.masked_fill(bounds.isfinite().logical_not(),
                             std::numeric_limits<double>::quiet_NaN());
}

void check(const FactoredPart& part, const at::Tensor& sums, at::ScalarType dtype) {
  check_flat({"factored moments", "gradient"}, part.gradient);
  ZP_CHECK(sums.scalar_type() == dtype && sums.numel() == part.shape.sums() &&
               sums.device() == part.gradient.device(),
           "factored moments: expected ", part.shape.sums(), " sums of ", dtype, " on ",
           part.gradient.device(), ", got ", sums.numel(), " of ", sums.scalar_type(), " on ",
           sums.device());
}

}  // namespace

at::Tensor square_roots(const at::Tensor& numbers) {
  return numbers.to(at::kDouble).sqrt_().to(at::kFloat);
}

FactoredShape factored_shape(at::IntArrayRef sizes) {
  const int64_t columns = sizes[sizes.size() - 1];
  const int64_t rows = sizes[sizes.size() - 2];
  return {.batches = c10::multiply_integers(sizes) / (rows * columns),
          .rows = rows,
          .columns = columns};
}

void raise_to_magnitudes(const FactoredPart& part, const at::Tensor& magnitudes) {
  check(part, magnitudes, at::kFloat);
  if (part.gradient.is_meta() || part.gradient.numel() == 0) return;
  if (part.has_loops()) {
    raise_by_loops(part, magnitudes);
  } else {
    raise_by_operators(part, magnitudes);
  }
}

at::Tensor windows_of(const FactoredShape& shape, const at::Tensor& magnitudes) {
  if (magnitudes.is_meta()) return at::empty_like(magnitudes, at::kDouble);
  const at::Tensor bounds = magnitudes.to(at::kDouble).square_();
  rows_of(shape, bounds).mul_(static_cast<double>(shape.columns));
  columns_of(shape, bounds).mul_(static_cast<double>(shape.rows));
  return windows_for(bounds);
}

void add_squares(const FactoredPart& part, const at::Tensor& windows, const at::Tensor& sums) {
  check(part, sums, at::kDouble);
  if (part.gradient.is_meta() || part.gradient.numel() == 0) return;
  if (part.has_loops()) {
    add_by_loops(part, windows, sums);
  } else {
    add_by_operators(part, windows, sums);
  }
}

void FactoredMoments::take(const at::Tensor& sums, double rate) const {
  const auto take_half = [&](const at::Tensor& moments, const at::Tensor& of_sums, int64_t count) {
    const at::Tensor mean = of_sums.div(static_cast<double>(count));
    moments.copy_(moments.to(at::kDouble).mul_(1 - rate).add_(mean.mul_(rate)));
  };
  take_half(rows, rows_of(shape, sums), shape.columns);
  take_half(columns, columns_of(shape, sums), shape.rows);
}

void FactoredMoments::divide_by_roots(const FactoredPart& part, double floor,
                                      const at::Tensor& directions) const {
  if (part.gradient.is_meta() || part.gradient.numel() == 0) return;
  const at::Tensor wide = rows.to(at::kDouble).view({shape.batches, shape.rows});
  // Rounded as squares are, since the order of a device's sum is its own.
  const at::Tensor window =
      windows_for(wide.amax(1, /*keepdim=*/true).mul(static_cast<double>(shape.rows)));
  const at::Tensor mean =
      wide.add(window).sub_(window).sum(1, /*keepdim=*/true).div_(static_cast<double>(shape.rows));
  const at::Tensor factors = wide.div(mean.clamp_min_(floor)).to(at::kFloat).view(-1);
  const auto least = static_cast<float>(floor * floor);
  if (part.has_loops()) {
    divide_by_loops(part, factors, columns, least, directions);
  } else {
    divide_by_operators(part, factors, columns, least, directions);
  }
}

}  // namespace zeropage::optim

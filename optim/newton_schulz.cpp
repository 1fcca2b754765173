#include "optim/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "optim/flat_norm.h"
#include "optim/parallel.h"

// MKL's own call, in LibTorch. Null where LibTorch multiplies matrices by another library.
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int threads);

namespace zeropage::optim {
namespace {

// MKL adds in another order where it may use several threads, even if it uses one, as within a parallel loop. While it lives, products of
// the calling thread are those of one thread.
class ProductsOfOneThread {
 public:
  ProductsOfOneThread() {
    if (MKL_Set_Num_Threads_Local != nullptr) before_ = MKL_Set_Num_Threads_Local(1);
  }
  ~ProductsOfOneThread() {
    if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(before_);
  }
  ProductsOfOneThread(const ProductsOfOneThread&) = delete;
  ProductsOfOneThread& operator=(const ProductsOfOneThread&) = delete;

 private:
  int before_ = 0;
};

constexpr int64_t kTileRows = 128;
constexpr int64_t kTileColumns = 2048;

int64_t tiles_in(int64_t numel, int64_t tile) {
  return (numel + tile - 1) / tile;
}

at::Tensor tile_of(const at::Tensor& tensor, int64_t dim, int64_t index, int64_t numel) {
  const int64_t begin = index * numel;
  return tensor.narrow(dim, begin, std::min(numel, tensor.size(dim) - begin));
}

// visit(row, column) of each tile on or below the diagonal.
template <typename Visit>
void for_lower_tiles(int64_t tiles, const Visit& visit) {
  parallel_for(tiles * (tiles + 1) / 2, 1, [&](int64_t begin, int64_t end) {
    const ProductsOfOneThread scope;
    for (int64_t index = begin; index < end; ++index) {
      int64_t row = 0;
      while ((row + 1) * (row + 2) / 2 <= index) ++row;
      visit(row, index - row * (row + 1) / 2);
    }
  });
}

// to = b base + c left left^T, which is symmetric. [m, m], and [m, n].
void symmetric_product(const at::Tensor& to, const at::Tensor& left, const at::Tensor& base,
                       double b, double c) {
  for_lower_tiles(tiles_in(left.size(0), kTileRows), [&](int64_t row, int64_t column) {
    const auto of = [&](const at::Tensor& square) {
      return tile_of(tile_of(square, 0, row, kTileRows), 1, column, kTileRows);
    };
    const at::Tensor upper = tile_of(left, 0, row, kTileRows);
    const at::Tensor lower = tile_of(left, 0, column, kTileRows).t();
    at::Tensor tile = of(to);
    if (base.defined()) {
      at::addmm_out(tile, of(base), upper, lower, b, c);
    } else {
      at::mm_out(tile, upper, lower);
    }
    if (row != column) {
      tile_of(tile_of(to, 0, column, kTileRows), 1, row, kTileRows).copy_(tile.t());
    }
  });
}

// to = a right + left right. [m, n], [m, m].
void add_product(const at::Tensor& to, const at::Tensor& left, const at::Tensor& right, double a) {
  const int64_t rows = tiles_in(left.size(0), kTileRows);
  const int64_t columns = tiles_in(right.size(1), kTileColumns);
  parallel_for(rows * columns, 1, [&](int64_t begin, int64_t end) {
    const ProductsOfOneThread scope;
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = index % rows;
      const at::Tensor right_columns = tile_of(right, 1, index / rows, kTileColumns);
      at::Tensor tile = tile_of(tile_of(to, 0, row, kTileRows), 1, index / rows, kTileColumns);
      at::addmm_out(tile, tile_of(right_columns, 0, row, kTileRows),
                    tile_of(left, 0, row, kTileRows), right_columns, a, 1);
    }
  });
}

// wide: contiguous fp32 [m, n] on the host, m <= n, which is written to.
at::Tensor iterated_in_tiles(at::Tensor wide, const NewtonSchulz& how) {
  const auto [a, b, c] = how.coefficients;
  const double norm = std::sqrt(sum_of_squares(wide.view(-1)).value());
  wide.mul_(1 / std::max(norm, how.eps));
  at::Tensor next = at::empty_like(wide);
  const at::Tensor gram = at::empty({wide.size(0), wide.size(0)}, wide.options());
  const at::Tensor polynomial = at::empty_like(gram);
  for (int64_t step = 0; step < how.steps; ++step) {
    symmetric_product(gram, wide, /*base=*/{}, 0, 1);
    symmetric_product(polynomial, gram, gram, b, c);
    add_product(next, polynomial, wide, a);
    std::swap(wide, next);
  }
  return wide;
}

// By torch.optim.Muon's operators.
at::Tensor iterated(at::Tensor wide, const NewtonSchulz& how) {
  const auto [a, b, c] = how.coefficients;
  wide = wide / wide.norm().clamp_min(how.eps);
  for (int64_t step = 0; step < how.steps; ++step) {
    const at::Tensor gram = at::mm(wide, wide.t());
    const at::Tensor polynomial = at::addmm(gram, gram, gram, b, c);
    wide = at::addmm(wide, polynomial, wide, a, 1);
  }
  return wide;
}

}  // namespace

at::Tensor orthogonalised(const at::Tensor& matrix, const NewtonSchulz& how) {
  if (matrix.is_meta()) {
    // What a simulation counts: two matrices, and two of their smaller side.
    const int64_t least = std::min(matrix.size(0), matrix.size(1));
    const at::Tensor squares = at::empty({2, least, least}, matrix.options());
    const at::Tensor other = at::empty(matrix.sizes(), matrix.options());
    return at::empty(matrix.sizes(), matrix.options().dtype(at::kFloat));
  }
  if (matrix.numel() == 0) return at::zeros(matrix.sizes(), matrix.options().dtype(at::kFloat));
  const bool is_tall = matrix.size(0) > matrix.size(1);
  const at::Tensor as_wide = is_tall ? matrix.t() : matrix;
  at::Tensor result;
  if (matrix.is_cpu() && how.dtype == at::kFloat) {
    at::Tensor wide = at::empty(as_wide.sizes(), matrix.options().dtype(at::kFloat));
    wide.copy_(as_wide);
    result = iterated_in_tiles(std::move(wide), how);
  } else {
    result = iterated(as_wide.to(how.dtype), how);
  }
  return (is_tall ? result.t() : result).to(at::kFloat);
}

}  // namespace zeropage::optim

// The orthogonalisation of a matrix by Newton-Schulz iterations (Jordan et al. 2024, "Muon: an optimizer for hidden layers
// in neural networks"):
//
//   X = matrix / |matrix|;  steps times: A = X X^T, X = a X + (b A + c A^2) X
//
// In fp32 on the host products are made in tiles of fixed sizes, each by one thread. So the bits do not depend on the number
// of threads, and of A and A^2, which are symmetric, only a half is computed: 0.7 of the operations for a square matrix.
// Elsewhere, and in bf16, products are LibTorch's.
// Cost: for [m, n] with m <= n, 4 m^2 n + 2 m^3 operations a step, without the halves; memory of two matrices and two of [m, m].
// Threads: any; tiles are shared by optim/parallel.h's.
#pragma once

#include <cstdint>
#include <tuple>

#include <ATen/core/TensorBody.h>

namespace zeropage::optim {

struct NewtonSchulz {
  std::tuple<double, double, double> coefficients;
  int64_t steps = 0;
  double eps = 0;
  at::ScalarType dtype = at::kFloat;  // of the iteration: fp32 or bf16
};

// matrix: [m, n], floating point, any strides. Returns [m, n] in fp32.
at::Tensor orthogonalised(const at::Tensor& matrix, const NewtonSchulz& how);

}  // namespace zeropage::optim

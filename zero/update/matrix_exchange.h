// The way of matrices to their owners, who have them as a whole for a while, and of what becomes of them back to the ranks that
// update their elements.
//
// A pair of ranks exchanges one message each way, both times; messages of nothing are not sent. In round t rank r meets rank
// t - r, so no rank waits for two others. For a matrix of E elements in b bytes, of which each of N ranks has as many, (N-1)/N E b
// bytes travel to the owner, and as many back; where each rank updates all elements nothing travels to it, and (N-1) E b back.
//
// Collective over the ranks that share the pages. Threads: the training thread.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/pages/parameter_pages.h"

namespace zeropage {

class MatrixExchange {
 public:
  struct Matrix {
    size_t parameter = 0;
    int owner = 0;
    at::ScalarType wire_dtype = at::kFloat;
    // Changes all of it in place: shaped as the parameter, fp32, on the communicator's device. Called on its owner.
    std::function<void(const at::Tensor& matrix)> transform;
  };

  explicit MatrixExchange(const ParameterPages& pages) : pages_(pages) {}

  // of_page: [owned numel] fp32, what this rank has of a page; it becomes what the owners made of it. Elsewhere than in the
  // matrices it stays as it is.
  void run(std::span<const Matrix> matrices,
           const std::function<at::Tensor(size_t page)>& of_page) const;

 private:
  class Run;

  const ParameterPages& pages_;
};

}  // namespace zeropage

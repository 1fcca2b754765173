// The way of matrices to their owners, who have them as a whole for a while, and of what becomes of them back to the ranks that
// update their elements.
//
// A pair of ranks exchanges one message each way, both times; messages of nothing are not sent. In round t rank r meets rank
// t - r, so no rank waits for two others. For a matrix of E elements in b bytes, of which each of N ranks has as many, (N-1)/N E b
// bytes travel to the owner, and as many back; where each rank updates all elements nothing travels to it, and (N-1) E b back.
//
// Messages travel beside the caller from the one call to the next. Two exchanges may be under way: begin() of the one before
// transform() of the other, and finish() of that last.
//
// Collective over the ranks that share the pages: all calls, in the same order. Lifetime: within a step, whose pages' values
// of_page gives. Threads: the training thread.
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/pages/parameter_pages.h"
#include "zeropage/detail/pending.h"

namespace zeropage::zero {

class MatrixExchange {
 public:
  struct Matrix {
    size_t parameter = 0;
    int owner = 0;
    at::ScalarType wire_dtype = at::kFloat;
    // Changes all of it in place: shaped as the parameter, fp32, on the communicator's device. Called on its owner.
    std::function<void(const at::Tensor& matrix)> transform;
  };
  // [owned numel] fp32, what this rank has of a page; it becomes what the owners made of it. Elsewhere than in the matrices it
  // stays as it is.
  using OfPage = std::function<at::Tensor(size_t page)>;

  MatrixExchange(const ParameterPages& pages, std::vector<Matrix> matrices, OfPage of_page);

  // Sends what this rank has of other ranks' matrices.
  void begin();
  // Waits for this rank's own, transforms them, and sends them back.
  void transform();
  // Waits for the others' answers.
  void finish();

 private:
  enum class Way : uint8_t { kToOwner, kFromOwner };
  struct Message {
    int peer = 0;
    at::ScalarType dtype = at::kFloat;
    // Whether this rank sends it.
    bool is_sent = false;
    std::vector<size_t> matrices = {};
    at::Tensor buffer = {};
    memory::Pending pending = {};
  };

  const PlacedParameter& placed(size_t index) const {
    return pages_.parameters()[matrices_[index].parameter];
  }
  Range held_by(int rank, size_t index) const;
  Range part_of(int rank, size_t index) const {
    return intersection(held_by(rank, index), placed(index).range);
  }
  at::Tensor in_whole(size_t index, const Range& part) const;
  at::Tensor in_page(size_t index, const Range& part) const;
  at::Tensor shaped(size_t index) const;

  void gather_own();
  void scatter_own();
  Message message(int from, int to, Way way, at::ScalarType dtype) const;
  template <typename Visit>
  void for_each_piece(const Message& message, Way way, const Visit& visit) const;
  void depart(Way way, const char* what);
  void arrive(Way way);

  const ParameterPages& pages_;
  const std::vector<Matrix> matrices_;
  const OfPage of_page_;
  const bool is_shared_;           // each rank updates all elements
  std::vector<at::Tensor> whole_;  // by matrix, on its owner: [range numel] fp32
  std::vector<Message> under_way_;
};

}  // namespace zeropage::zero

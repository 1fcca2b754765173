// Which part of a dimension each rank of a tensor-parallel group has.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

namespace zeropage::parallel {

// A dimension of `total` elements, cut into as many slices as there are ranks. Slices differ by one unit at
// most: of 257 elements, two ranks have 128 and 129.
class Slices {
 public:
  // unit: elements that stay together, such as those of an attention head.
  // Throws unless `total` is a multiple of it and there is a unit for each rank. who: for the error.
  Slices(int64_t total, int64_t unit, int ranks, const std::string& who);

  int64_t total() const { return total_; }
  int64_t unit() const { return unit_; }
  int ranks() const { return ranks_; }
  int64_t begin(int rank) const { return total_ / unit_ * rank / ranks_ * unit_; }
  int64_t end(int rank) const { return begin(rank + 1); }
  bool are_even() const { return total_ / unit_ % ranks_ == 0; }
  int64_t size(int rank) const { return end(rank) - begin(rank); }
  std::vector<int64_t> sizes() const;

  // A copy of this rank's elements of dimension `dim`. parts: equal stretches of the dimension, such as the
  // rows of queries, keys and values, of which each is cut for itself; total() is that of one part.
  at::Tensor take(const at::Tensor& whole, int64_t dim, int64_t parts, int rank) const;

 private:
  int64_t total_;
  int64_t unit_;
  int ranks_;
};

// Throws where ranks would get other numbers of units. option: by which a script says that they may. who: for the error.
void check_is_even(const Slices& slices, const std::string& who, const std::string& option);

// How a tensor was cut: dimension `dim` of the whole is `parts` equal stretches, and each is cut for itself.
struct SlicedDimension {
  Slices slices;
  int64_t dim = 0;
  int64_t parts = 1;

  at::Tensor take(const at::Tensor& whole, int rank) const {
    return slices.take(whole, dim, parts, rank);
  }
  // Of the whole tensor, of which one slice has these sizes.
  std::vector<int64_t> whole_sizes(at::IntArrayRef sizes) const;
};

}  // namespace zeropage::parallel

#include "zeropage/detail/slices.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "zeropage/check.h"

namespace zeropage::parallel {

Slices::Slices(int64_t total, int64_t unit, int ranks, const std::string& who)
    : total_(total), unit_(unit), ranks_(ranks) {
  ZP_CHECK(unit >= 1 && total % unit == 0, who, ": expected a multiple of ", unit,
           " elements, which stay together, got ", total, "; give it the size of a head, or 1");
  ZP_CHECK(total / unit >= ranks, who, ": expected at least one slice of ", unit,
           " elements for each of ", ranks, " ranks, got ", total, " elements; use fewer ranks");
}

std::vector<int64_t> Slices::sizes() const {
  std::vector<int64_t> sizes;
  sizes.reserve(static_cast<size_t>(ranks_));
  for (int rank = 0; rank < ranks_; ++rank) sizes.push_back(size(rank));
  return sizes;
}

void check_is_even(const Slices& slices, const std::string& who, const std::string& option) {
  ZP_CHECK(slices.are_even(), who, ": expected units that ", slices.ranks(), " ranks divide, got ",
           slices.total() / slices.unit(), " of ", slices.unit(), " elements, so ranks would have ",
           slices.sizes(),
           ", and layers that are used together, such as queries and keys, might be cut at other "
           "places; use a number "
           "of ranks that divides the units, or say ",
           option,
           " of all these layers, with as many units each: a unit of queries is all heads that "
           "share a key");
}

int64_t SlicedDimension::total() const {
  int64_t total = 0;
  for (const Slices& part : parts_) total += part.total();
  return total;
}

int64_t SlicedDimension::size(int rank) const {
  int64_t size = 0;
  for (const Slices& part : parts_) size += part.size(rank);
  return size;
}

bool SlicedDimension::is_cut_as(const SlicedDimension& other) const {
  const auto alike = [](const Slices& a, const Slices& b) {
    return a.total() == b.total() && a.sizes() == b.sizes();
  };
  return dim_ == other.dim_ && parts_.size() == other.parts_.size() &&
         std::equal(parts_.begin(), parts_.end(), other.parts_.begin(), alike);
}

at::Tensor SlicedDimension::take(const at::Tensor& whole, int64_t dim, int rank) const {
  const at::NoGradGuard no_grad;
  TORCH_INTERNAL_ASSERT(whole.size(dim) == total());
  std::vector<at::Tensor> slices;
  int64_t begin = 0;
  for (const Slices& part : parts_) {
    slices.push_back(whole.narrow(dim, begin + part.begin(rank), part.size(rank)));
    begin += part.total();
  }
  return at::cat(slices, dim);
}

std::vector<int64_t> SlicedDimension::whole_sizes(at::IntArrayRef sizes) const {
  std::vector<int64_t> whole = sizes.vec();
  whole.at(static_cast<size_t>(dim_)) = total();
  return whole;
}

}  // namespace zeropage::parallel

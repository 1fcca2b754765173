#include "parallel/slices.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "memory/check.h"

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

at::Tensor Slices::take(const at::Tensor& whole, int64_t dim, int64_t parts, int rank) const {
  const at::NoGradGuard no_grad;
  TORCH_INTERNAL_ASSERT(whole.size(dim) == parts * total_);
  std::vector<at::Tensor> slices;
  for (int64_t part = 0; part < parts; ++part) {
    slices.push_back(whole.narrow(dim, part * total_ + begin(rank), size(rank)));
  }
  return at::cat(slices, dim);
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

std::vector<int64_t> SlicedDimension::whole_sizes(at::IntArrayRef sizes) const {
  std::vector<int64_t> whole = sizes.vec();
  whole.at(static_cast<size_t>(dim)) = parts * slices.total();
  return whole;
}

}  // namespace zeropage::parallel

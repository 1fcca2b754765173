#include "zero/saving/detail/element_runs.h"

#include <vector>

namespace zeropage::detail {

void for_each_run(const PlacedParameter& placed, const Range& in_page,
                  const std::function<void(const ElementRun&)>& visit) {
  const at::Tensor& tensor = placed.parameter.tensor;
  if (tensor.numel() == 0) return;
  // The last dimensions that lie as in a contiguous tensor are one stretch.
  int64_t stretch = 1;
  int64_t outer = tensor.dim();
  while (outer > 0 && (tensor.size(outer - 1) == 1 || tensor.stride(outer - 1) == stretch)) {
    stretch *= tensor.size(--outer);
  }
  std::vector<int64_t> index(static_cast<size_t>(outer), 0);
  for (int64_t first = 0; first < tensor.numel(); first += stretch) {
    int64_t begin = placed.offset;
    for (int64_t dim = 0; dim < outer; ++dim) {
      begin += index[static_cast<size_t>(dim)] * tensor.stride(dim);
    }
    const Range found = intersection(in_page, {begin, begin + stretch});
    if (!found.empty()) visit({first + found.begin - begin, found.begin, found.numel()});
    for (int64_t dim = outer; dim-- > 0;) {
      if (++index[static_cast<size_t>(dim)] < tensor.size(dim)) break;
      index[static_cast<size_t>(dim)] = 0;
    }
  }
}

}  // namespace zeropage::detail

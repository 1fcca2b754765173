#include "zero/pages/placed_parameters.h"

#include <utility>

namespace zeropage::zero {

PlacedParameters::PlacedParameters(std::vector<PlacedParameter> parameters, size_t pages)
    : parameters_(std::move(parameters)), of_pages_(pages) {
  index_.reserve(parameters_.size());
  for (size_t index = 0; index < parameters_.size(); ++index) {
    const PlacedParameter& placed = parameters_[index];
    spots_.push_back({placed.parameter.tensor.unsafeGetTensorImpl(), placed.page, placed.offset});
    of_pages_[placed.page].push_back(index);
    index_.emplace(spots_.back().impl, index);
  }
}

int64_t PlacedParameters::index_of(const at::Tensor& tensor) const {
  const auto at = index_.find(tensor.unsafeGetTensorImpl());
  return at == index_.end() ? -1 : static_cast<int64_t>(at->second);
}

}  // namespace zeropage::zero

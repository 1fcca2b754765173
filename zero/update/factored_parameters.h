// What an update does for the sums over rows and columns that its first pass reads (zero/update/factor_sums.h).
#pragma once

#include <cstddef>

#include <ATen/core/TensorBody.h>

namespace zeropage::zero {

// The parameters of a page, as the page's update has parts of them. gradient: [owned numel], multiplied by the scale.
class FactoredParameters {
 public:
  FactoredParameters(const FactoredParameters&) = delete;
  FactoredParameters& operator=(const FactoredParameters&) = delete;

  virtual void raise_to_magnitudes(size_t parameter, const at::Tensor& gradient, double scale,
                                   const at::Tensor& magnitudes) = 0;
  virtual void add_squares(size_t parameter, const at::Tensor& gradient, double scale,
                           const at::Tensor& windows, const at::Tensor& sums) = 0;
  // The sums of all ranks, for the step that is made next.
  virtual void take(size_t parameter, const at::Tensor& sums) = 0;

 protected:
  FactoredParameters() = default;
  ~FactoredParameters() = default;
};

}  // namespace zeropage::zero

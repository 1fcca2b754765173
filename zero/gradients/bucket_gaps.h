// Where in a page's bucket no parameter that trains lies. What is there is reduced with the rest, and stepped
// over by the optimizer, so it has to be zero.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/pages/parameter_pages.h"
#include "zeropage/detail/range.h"

namespace zeropage::zero {

// parameters: those of the page that train. Ascending, to the end of the padding; one that has gaps itself is
// one of them as a whole.
std::vector<Range> gaps_between(const ParameterPages& pages, size_t page,
                                const std::vector<size_t>& parameters);

// Zeros there. bucket: [padded_numel].
void zero_gaps(const at::Tensor& bucket, const std::vector<Range>& gaps);

}  // namespace zeropage::zero

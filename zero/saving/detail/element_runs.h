// Where the elements of a parameter, in row-major order as files have them, lie in its page.
#pragma once

#include <cstdint>
#include <functional>

#include "zero/pages/parameter_pages.h"

namespace zeropage::detail {

// Elements that follow each other in both.
struct ElementRun {
  int64_t in_tensor = 0;  // of the first, in row-major order
  int64_t in_page = 0;
  int64_t numel = 0;
};

// Calls visit for what of the parameter lies in the range of its page, in the order of the tensor. A
// contiguous parameter is one run; of one with other strides a run may be one element.
void for_each_run(const PlacedParameter& placed, const Range& in_page,
                  const std::function<void(const ElementRun&)>& visit);

}  // namespace zeropage::detail

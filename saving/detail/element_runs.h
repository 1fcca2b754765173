// Where the elements of a parameter, in row-major order as files have them, lie in its page. Files have whole
// parameters, and a page may have a slice of one.
#pragma once

#include <cstdint>
#include <functional>

#include "zero/pages/parameter_pages.h"

namespace zeropage::saving {

// Elements that follow each other in both.
struct ElementRun {
  int64_t in_whole = 0;  // of the first, in row-major order of the whole parameter
  int64_t in_page = 0;
  int64_t numel = 0;
};

// Calls visit for what of the parameter lies in the range of its page, in the order of the tensor. A
// contiguous parameter is one run; of one with other strides a run may be one element. Of a slice of its last
// dimension every row is one.
void for_each_run(const zero::PlacedParameter& placed, const Range& in_page,
                  const std::function<void(const ElementRun&)>& visit);

}  // namespace zeropage::saving

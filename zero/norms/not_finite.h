// Parameters whose gradients have an infinity or NaN.
#pragma once

#include <string>
#include <vector>

#include "zero/pages/parameter_pages.h"

namespace zeropage::zero {

// parameters: indices.
std::vector<std::string> names_of(const ParameterPages& pages,
                                  const std::vector<size_t>& parameters);
// The same with those of the other stages of a pipeline, in their order. Collective over them.
std::vector<std::string> names_over_stages(const ParameterPages& pages,
                                           const std::vector<size_t>& parameters);
// "the gradients of parameters "a", "b", "c" and 2 more are not finite".
std::string say_not_finite(const std::vector<std::string>& names);

}  // namespace zeropage::zero

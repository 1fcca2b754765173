// What an autograd function that cuts or gathers a dimension keeps for its backward.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>

#include "parallel/detail/kernels.h"
#include "zeropage/detail/slices.h"

namespace zeropage::parallel::detail {

struct KeptSlices {
  static void keep(torch::autograd::AutogradContext* context, const Slices& slices,
                   const RanksPointer& ranks, const std::string& name, int64_t dim) {
    context->saved_data["ranks"] = ranks;
    context->saved_data["name"] = name;
    context->saved_data["sizes"] = slices.sizes();
    context->saved_data["dim"] = dim;
  }
  // In backward, which is not to be differentiated itself. who: the function.
  KeptSlices(const char* who, torch::autograd::AutogradContext* context)
      : ranks(context->saved_data["ranks"].toCustomClass<Ranks>()),
        name(context->saved_data["name"].toStringRef()),
        sizes(context->saved_data["sizes"].toIntVector()),
        dim(context->saved_data["dim"].toInt()) {
    refuse_second_derivative(who, name);
  }

  const RanksPointer ranks;
  const std::string name;
  const std::vector<int64_t> sizes;
  const int64_t dim;
};

}  // namespace zeropage::parallel::detail

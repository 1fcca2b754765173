// What an optimizer's update of one element reads.
#pragma once

#include <cstdint>

namespace zeropage {

enum class UpdateReads : uint8_t {
  kElement,  // that element's value, gradient and state. Any part of a parameter can be updated by itself
  kSums,    // and sums over the elements of its parameter, as LAMB's norms
  kMatrix,  // and all elements of its matrix, as Muon's
  kModel,   // and other parameters, as torch::optim::LBFGS's, or nobody knows: it cannot be sharded
};

}  // namespace zeropage

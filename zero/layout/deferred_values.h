// What a module that was constructed without memory needs to get its values.
#pragma once

#include <vector>

#include <ATen/core/TensorBody.h>

#include "operators/construction_tape.h"

namespace zeropage::zero {

struct DeferredValues {
  const operators::ConstructionTape& tape;
  std::vector<at::Tensor> buffers;  // of the module: they get their values along with parameters
};

}  // namespace zeropage::zero

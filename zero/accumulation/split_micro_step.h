// A micro-step between the halves of its backward (accumulate/split_backward.h): the input's gradient is there, and
// those of the parameters are not. Accumulator::finish_backward() counts it. Dropping it drops the micro-step.
#pragma once

#include <ATen/core/TensorBody.h>

#include "accumulate/split_backward.h"

namespace zeropage {

// What a micro-step counts for in the step.
struct MicroStepShare {
  at::Tensor loss;  // its value; undefined where other ranks compute it
  double weight = 1;
  double scale = 1;  // of the loss
};

struct SplitMicroStep {
  accumulate::SplitBackward backward;
  MicroStepShare share;

  // Weighted and scaled as the loss is. Undefined where no input was named.
  const at::Tensor& input_gradient() const { return backward.input_gradient(); }
};

}  // namespace zeropage

// What p.grad() is once its page is reduced, until it is zeroed. It keeps the memory of the page's gradient
// (zero/gradients/gradient_memory.h).
//
// Threads: as operators; of() and replaced() the training thread, or the one that runs backward.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "operators/tensor_mark.h"
#include "paging/pins.h"

namespace zeropage::zero {

class ReducedGradients {
 public:
  virtual ~ReducedGradients() = default;
  ReducedGradients(const ReducedGradients&) = delete;
  ReducedGradients& operator=(const ReducedGradients&) = delete;

  // Whether the tensor is what of() gave since the page's gradient got its memory.
  virtual bool is(size_t parameter, const at::Tensor& gradient) const = 0;
  // Shaped as the parameter. REQUIRES: the page's gradient has memory.
  virtual at::Tensor of(size_t parameter) = 0;
  // The same with the values of `gradient`, another tensor by which the user replaced p.grad() after the
  // reduction. Throws where that cannot be honoured.
  virtual at::Tensor replaced(size_t parameter, const at::Tensor& gradient) = 0;

  // Called with an operator's name before it takes what is p.grad() now, and before those are gathered, until it is
  // another call; empty: nobody. A call may change the gradients.
  using BeforeUse = operators::TensorMark::BeforeUse;
  virtual void set_before_use(BeforeUse call) = 0;

  // The same beside it, where other ranks have parts of them; it changes no gradient.
  virtual void set_on_use(BeforeUse /*call*/) {}

  // Makes p.grad() of these parameters whole for as long as `pins` lives. Collective.
  virtual void gather(const std::vector<size_t>& /*parameters*/, paging::Pins& /*pins*/) {}
  // What was written to them is in the reduced gradient. Throws if one is in use. who: "step()".
  virtual void release(const char* /*who*/) {}
  // Lets go of what was gathered of a page whose gradients have all been zeroed, unless it is in use.
  virtual void release_zeroed(size_t /*page*/) {}

 protected:
  ReducedGradients() = default;
};

}  // namespace zeropage::zero

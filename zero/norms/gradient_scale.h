// Finds the factor by which a script has multiplied this rank's gradients since they were noted, from a few
// elements of each parameter.
//
// Most parameters must have been multiplied by it, so a script that changes some of them, or zeroes them, has multiplied
// by nothing. A tied weight does not count, since the other stage's gradient is added to it.
//
// Cost: 32 elements a parameter are read, twice a step.
// Lifetime: shares the pages and the gradients. Threads: the training thread.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/gradients/step_gradients.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage::zero {

class GradientScale {
 public:
  GradientScale(std::shared_ptr<const ParameterPages> pages,
                std::shared_ptr<const StepGradients> gradients)
      : pages_(std::move(pages)), gradients_(std::move(gradients)) {}

  void note();
  bool is_noted() const { return is_noted_; }
  void forget() { is_noted_ = false; }
  // The factor since then; 1 if there is none, or nothing was noted. Forgets what was noted. REQUIRES: what was
  // written to
  // p.grad() is taken over.
  double take();

 private:
  struct Samples {
    at::Tensor places;               // of the owned gradient; on its device
    std::vector<size_t> parameters;  // by place
    at::Tensor values;               // fp64, on that device
  };

  Samples make_samples(size_t page) const;
  // Undefined where there are none.
  static at::Tensor values_at(const at::Tensor& owned, const Samples& samples);

  const std::shared_ptr<const ParameterPages> pages_;
  const std::shared_ptr<const StepGradients> gradients_;
  std::vector<Samples> of_pages_;  // made once
  bool is_noted_ = false;
};

}  // namespace zeropage::zero

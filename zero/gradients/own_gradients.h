// Refuses a script that multiplies reduced gradients by what it has read of them and of others, which it has set by hand
// to other values on each rank.
//
// Those are each rank's own until they are averaged. torch::nn::utils::clip_grad_norm_ would take another norm on each
// rank, and each would multiply its shards of the means by another factor.
//
// Cost: a look at all p.grad() in the first operator that multiplies one after others were read, and seldom later in a
// step.
// Lifetime: shares the reducer. Threads: the training thread. Collective where there are such gradients.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "zero/gradients/gradient_reducer.h"

namespace zeropage::zero {

class OwnGradients {
 public:
  explicit OwnGradients(std::shared_ptr<GradientReducer> reducer);
  ~OwnGradients();
  OwnGradients(const OwnGradients&) = delete;
  OwnGradients& operator=(const OwnGradients&) = delete;

  // The next gradients are another step's.
  void begin_step() {
    has_read_ = false;
    turns_ = 0;
  }

 private:
  void look(const c10::OperatorName& operation, bool reads);
  void check_alike(const c10::OperatorName& operation) const;
  // Parameters whose p.grad() no reduction has averaged.
  std::vector<size_t> own() const;

  const std::shared_ptr<GradientReducer> reducer_;
  bool has_read_ = false;
  uint64_t turns_ = 0;  // from reading to multiplying
};

}  // namespace zeropage::zero

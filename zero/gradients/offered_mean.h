// Turns the sums of an accumulation into the mean if a script reads them between the last backward and the step.
//
// Without such a read the step multiplies sums in its own pass. A script that clips, reads or changes p.grad()
// means the mean. So the first operator on a p.grad() that would treat a sum and a mean differently makes all of
// them the mean, and so do calls of this library that read gradients. A tensor that a script assigns to p.grad() is
// a mean, too.
//
// Lifetime: shares the reducer. Threads: the training thread. Collective: what makes the mean.
#pragma once

#include <functional>
#include <memory>

#include "zero/gradients/gradient_reducer.h"

namespace zeropage::zero {

class OfferedMean {
 public:
  explicit OfferedMean(std::shared_ptr<GradientReducer> reducer) : reducer_(std::move(reducer)) {}

  struct Offer {
    // Multiplies the sums, which are complete. Called once, until the offer ends; again where it throws.
    std::function<void()> make;
    // The step is left out if one of the gradients is not finite now, since the loss scale was too high for them.
    bool is_skipped_at_overflow = false;
  };

  void offer(Offer offer);
  bool is_offered() const { return is_offered_; }
  bool is_skipped_at_overflow() const { return is_offered_ && is_skipped_at_overflow_; }
  // Calls it, unless that was done.
  void make();
  // Before the step, which is of the mean where a script has replaced a gradient. Ends the offer.
  void settle();
  void end();

 private:
  bool any_replaced() const;

  const std::shared_ptr<GradientReducer> reducer_;
  bool is_offered_ = false;
  bool is_skipped_at_overflow_ = false;
  std::function<void()> make_;  // empty: none, or they are the mean
};

}  // namespace zeropage::zero

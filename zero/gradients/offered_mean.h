// Between the last backward of an accumulation and its step, whose gradients are sums: for who looks at them they become
// the mean.
//
// A step alone multiplies sums in its pass over them. A script that clips, reads or changes p.grad() means the mean, so the
// first operator on one that does not do the same to a sum makes all of them the mean, as do calls of this library that
// look. What a script puts in the place of p.grad() is a mean, too.
//
// Lifetime: shares the reducer. Threads: the training thread. Collective: what makes the mean.
#pragma once

#include <functional>
#include <memory>

#include "zero/gradients/gradient_reducer.h"

namespace zeropage {

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

}  // namespace zeropage

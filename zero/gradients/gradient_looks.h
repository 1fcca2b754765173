// What a script may do with p.grad() between the last backward and the step, and what its looks mean.
//
// Lifetime: share the reducer. Threads: the training thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "zero/gradients/backward.h"

namespace zeropage::zero {

// Turns the sums of an accumulation into the mean if a script reads them between the last backward and the step.
//
// Without such a read the step multiplies sums in its own pass. A script that clips, reads or changes p.grad()
// means the mean. So the first operator on a p.grad() that would treat a sum and a mean differently makes all of
// them the mean, and so do calls of this library that read gradients. A tensor that a script assigns to p.grad() is
// a mean, too.
//
// Collective: what makes the mean.
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

// Refuses a script that multiplies reduced gradients by what it has read of them and of others, which it has set by hand
// to other values on each rank.
//
// Those are each rank's own until they are averaged. torch::nn::utils::clip_grad_norm_ would take another norm on each
// rank, and each would multiply its shards of the means by another factor.
//
// Cost: a look at all p.grad() in the first operator that multiplies one after others were read, and seldom later in a
// step. Collective where there are such gradients.
class HandSetGradients {
 public:
  explicit HandSetGradients(std::shared_ptr<GradientReducer> reducer);
  ~HandSetGradients();
  HandSetGradients(const HandSetGradients&) = delete;
  HandSetGradients& operator=(const HandSetGradients&) = delete;

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

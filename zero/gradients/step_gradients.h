// The reduced gradients, as an optimizer step sees them.
//
// Lifetime: shares the reducer. Threads: the training thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "paging/pins.h"
#include "zero/gradients/backward.h"
#include "zero/gradients/gradient_looks.h"
#include "zeropage/detail/pending.h"

namespace zeropage::zero {

class StepGradients {
 public:
  explicit StepGradients(std::shared_ptr<GradientReducer> reducer)
      : reducer_(std::move(reducer)), mean_(reducer_), hand_set_(reducer_) {}

  // Makes the gradients ready for a step: reduces them if no backward since the last step did, and takes
  // over what was written to p.grad() since. Collective. Throws in the middle of an accumulation.
  void prepare();
  // The same for a read of gradients between backward and step, also in an accumulation that offers its mean.
  void prepare_to_look();
  OfferedMean& mean() { return mean_; }
  // After a step: the next prepare() is about new gradients.
  void end_step() {
    reducer_->begin_cycle();
    hand_set_.begin_step();
  }

  // Whether they are what the next step takes: a backward since the last one has averaged them, no other
  // has begun, and no accumulation is under way.
  bool are_averaged() const { return reducer_->is_reduced() && !reducer_->plan().accumulates(); }

  // Whether the parameter has a gradient, on any rank, that prepare() made ready and that was not zeroed since.
  bool has(size_t parameter) const {
    return reducer_->training().contains(parameter) &&
           reducer_->training().gradient(parameter).defined();
  }
  // Those that have one, ascending.
  std::vector<size_t> parameters() const;
  // Whether each parameter has one.
  std::vector<uint8_t> presence() const;

  // The gradient of what this rank owns of a page that trains; undefined where none of its parameters has one. It
  // may be other memory in each step. [owned numel]
  at::Tensor owned(size_t page) const { return reducer_->buckets().owned(page); }
  // Whether it is on the host, by itself.
  bool is_offloaded(size_t page) const { return reducer_->buckets().is_offloaded(page); }
  // owned(page) is complete when this has ended.
  memory::Pending arrival(size_t page) const { return reducer_->buckets().arrival(page); }
  // Calls change(owned(page)) for every page that has a gradient. REQUIRES: prepare().
  void change(const std::function<void(const at::Tensor& owned)>& change);

  // Makes what was written to owned(page) the gradient.
  void note_changed() { reducer_->buckets().note_reduced(); }

  // Makes p.grad() of those of the parameters that have one whole for as long as `pins` lives.
  // Throws unless the last backward averaged. Collective.
  void gather(const std::vector<size_t>& parameters, paging::Pins& pins);

  // Whether an optimizer of ours steps them.
  bool have_optimizer() const { return have_optimizer_; }
  void note_optimizer() { have_optimizer_ = true; }

 private:
  void prepare_mean();

  const std::shared_ptr<GradientReducer> reducer_;
  OfferedMean mean_;
  HandSetGradients hand_set_;
  bool have_optimizer_ = false;
};

}  // namespace zeropage::zero

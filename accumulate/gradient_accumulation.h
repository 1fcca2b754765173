// The gradients of one optimizer step of several backwards, its micro-steps: they are summed, and
// multiplied by one factor in the step.
//
//   GradientAccumulation accumulation(reducer, gradients, op);
//   { const GradientAccumulation::MicroStep one(accumulation, {...});  loss.backward(); }    several times
//   accumulation.finish();
//   ... the step ...
//   accumulation.end();
//
// Lifetime: shares the reducer; ends when it goes. Threads: the training thread.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "zero/gradients/backward.h"
#include "zero/gradients/step_gradients.h"

namespace zeropage::accumulate {

class GradientAccumulation {
 public:
  // From here on gradients are what reductions with `op` give. Throws if there are gradients already, or
  // another accumulation.
  GradientAccumulation(std::shared_ptr<zero::GradientReducer> reducer,
                       std::shared_ptr<zero::StepGradients> gradients, comm::ReduceOp op);
  ~GradientAccumulation();
  GradientAccumulation(const GradientAccumulation&) = delete;
  GradientAccumulation& operator=(const GradientAccumulation&) = delete;

  // Throws where the last micro-step did not end, or its sums were zeroed or replaced since.
  void check_goes_on() const;

  // While it lives, the one backward of a micro-step may run.
  class MicroStep {
   public:
    // plan: its op is the accumulation's, whatever it says.
    MicroStep(GradientAccumulation& accumulation, zero::BackwardPlan plan);
    ~MicroStep() { reducer_.set_plan(between_); }
    MicroStep(const MicroStep&) = delete;
    MicroStep& operator=(const MicroStep&) = delete;

    // The backward has returned, and not thrown.
    void has_ended();

   private:
    GradientAccumulation& accumulation_;
    zero::GradientReducer& reducer_;
    const zero::BackwardPlan between_;
  };

  // After the last micro-step: the offer's `make` is called before the first read of gradients from here on
  // (zero/gradients/gradient_looks.h). Reduces what no backward has. Collective.
  void offer_mean(zero::OfferedMean::Offer offer);
  // Makes the gradients ready for the step. Collective. After it no backward may run.
  void finish();
  // Drops all gradients; backwards are averaged again. Throws where one is in use.
  void end();

 private:
  void set_part(zero::StepPart part);
  void check_last_has_ended(const char* who) const;
  void remember_sums();
  // Between two micro-steps no operator may take p.grad(), or each may.
  void refuse_looks();
  void let_look();

  const std::shared_ptr<zero::GradientReducer> reducer_;
  const std::shared_ptr<zero::StepGradients> gradients_;
  bool has_ended_ = false;
  bool is_in_micro_step_ = false;
  bool refuses_looks_ = false;
  int64_t micro_steps_ = 0;  // that have ended, but the last
  // p.grad() of the parameters that had one behind the last micro-step, between two of them.
  std::vector<std::pair<size_t, c10::weak_intrusive_ptr<c10::TensorImpl>>> sums_;
};

}  // namespace zeropage::accumulate

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

#include "zero/gradients/gradient_reducer.h"
#include "zero/gradients/step_gradients.h"

namespace zeropage {

class GradientAccumulation {
 public:
  // From here on gradients are what reductions with `op` give. Throws if there are gradients already, or
  // another accumulation.
  GradientAccumulation(std::shared_ptr<GradientReducer> reducer,
                       std::shared_ptr<StepGradients> gradients, comm::ReduceOp op);
  ~GradientAccumulation();
  GradientAccumulation(const GradientAccumulation&) = delete;
  GradientAccumulation& operator=(const GradientAccumulation&) = delete;

  // While it lives, the one backward of a micro-step may run.
  class MicroStep {
   public:
    // plan: its op is the accumulation's, whatever it says.
    MicroStep(GradientAccumulation& accumulation, BackwardPlan plan);
    ~MicroStep() { reducer_.set_plan(between_); }
    MicroStep(const MicroStep&) = delete;
    MicroStep& operator=(const MicroStep&) = delete;

   private:
    GradientReducer& reducer_;
    const BackwardPlan between_;
  };

  // After the last micro-step: the offer's `make` is called before the first read of gradients from here on
  // (zero/gradients/offered_mean.h). Reduces what no backward has. Collective.
  void offer_mean(OfferedMean::Offer offer);
  // Makes the gradients ready for the step. Collective. After it no backward may run.
  void finish();
  // Drops all gradients; backwards are averaged again. Throws where one is in use.
  void end();

 private:
  void set_part(StepPart part);

  const std::shared_ptr<GradientReducer> reducer_;
  const std::shared_ptr<StepGradients> gradients_;
  bool has_ended_ = false;
};

}  // namespace zeropage

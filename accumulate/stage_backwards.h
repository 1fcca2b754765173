// An accumulator's micro-steps in a stage of a pipeline: a backward that begins with a gradient in place of a loss, and
// one in two halves (accumulate/split_backward.h).
//
//   StageBackwards backwards = accumulator.stage_backwards();
//   SplitMicroStep first = backwards.begin(loss, input);
//   send(first.input_gradient());
//   ...
//   backwards.finish(std::move(first));          // counts as accumulator.backward(loss)
//
// The halves of several micro-batches may overlap. Gradients are added up in the order in which micro-steps are
// finished. No parameter may change between the halves.
//
// Lifetime: the accumulator outlives it. Threads: the training thread. Collective, all of it.
// Throws what Accumulator::backward() throws.
#pragma once

#include <ATen/core/TensorBody.h>

#include "accumulate/micro_steps.h"
#include "accumulate/split_backward.h"
#include "accumulate/step_verdicts.h"

namespace zeropage::accumulate {

// A micro-step between the halves of its backward: the input's gradient is there, and those of the parameters are not.
// Dropping it drops the micro-step.
struct SplitMicroStep {
  accumulate::SplitBackward backward;
  MicroStepShare share;

  // Weighted and scaled as the loss is. Undefined where no input was named.
  const at::Tensor& input_gradient() const { return backward.input_gradient(); }
};

class StageBackwards {
 public:
  StageBackwards(MicroSteps& micro_steps, const StepVerdicts& verdicts)
      : micro_steps_(micro_steps), verdicts_(verdicts) {}

  // Accumulator::backward() of a micro-batch whose loss other ranks compute from this output: gradient is that of their
  // sum, weighted and scaled as they have it. What counts for the mean is theirs.
  void through(const at::Tensor& output, const at::Tensor& gradient);
  // The same where nothing trains that the output was computed of: no gradient.
  void past_frozen();

  // The first half of Accumulator::backward(), and of through(): the gradient of `input`, which the loss or the output
  // was computed of. Undefined: the second half is the whole backward.
  SplitMicroStep begin(const at::Tensor& loss, const at::Tensor& input, double weight = 1) const;
  SplitMicroStep begin_through(const at::Tensor& output, const at::Tensor& gradient,
                               const at::Tensor& input) const;
  // The second half, which is the micro-step.
  void finish(SplitMicroStep split);

 private:
  // Where other ranks compute the loss.
  MicroStepShare share_elsewhere() const;

  MicroSteps& micro_steps_;
  const StepVerdicts& verdicts_;
};

}  // namespace zeropage::accumulate

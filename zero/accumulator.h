// Makes one optimizer step of several micro-batches, from the mean of their gradients, in any
// precision.
//
//   zeropage::Accumulator accumulator(model, {.micro_steps = 8, .clip_norm = 1.0});
//   for (auto& batch : *loader) {
//     for (auto micro : zeropage::accumulate::micro_batches(batch, 8)) {
//       accumulator.backward(criterion(model(micro.data), micro.target));
//     }
//     accumulator.step(optimizer);  // and zeroes the gradients
//   }
//
// Backwards add up sums over ranks and micro-steps. One factor makes the mean of them, undoes the scale of the
// loss, and clips. The optimizer multiplies by it in its own pass: 1 / (weight of
// all micro-batches of all ranks x loss scale) x clip factor. Only gradients that travel in fp16
// are divided by the number of ranks in the reduction, before they are rounded.
//
// In a step all ranks agree first: on the weight, the norm (zero/gradient_norm.h) and whether
// gradients are finite. A step that is skipped leaves weights and optimizer state as they were, bit
// for bit.
//
// On an accelerator the update waits for the host where gradients decide something: with clip_norm,
// clip_value, norm_spikes, a loss scale that changes or stops, an optimizer by its class or offloaded.
// Otherwise the device itself skips an update with gradients that are not finite. step() then enqueues the update
// and waits for its report only, and enqueue_step() does not wait at all.
//
// Before the last backward() of a step p.grad() is a sum so far. After it a script that reads p.grad() sees the
// mean over micro-batches and ranks, without the scale of the loss, and may change it: the first operator that does
// more than multiply or zero, gradient_norm(), and clip_grad_norm_() make all of p.grad() the mean. That is
// collective, at stage 0 too. It throws where gradients are kept in half and scaled.
// With a loss scale that changes, that first read also finds out whether all gradients are finite, at the cost of
// reading them. If one is not, step() makes no step and lowers the scale, whatever the script has made of it since,
// and clip_grad_norm_() returns the norm.
// optimizer.step() is refused.
// Lifetime: shares the pages and the reducer with the model; either may go first. Destroying it drops the gradients
// of an accumulation that has begun.
// Collective: construction, backward(), step(). Threads: the training thread.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <vector>

#include <torch/optim/optimizer.h>

#include "zero/accumulator_options.h"
#include "zero/model_ref.h"
#include "zero/step_report.h"

namespace zeropage {

class Accumulator {
 public:
  // Throws where options contradict each other or the model's, or ranks differ.
  explicit Accumulator(const ModelRef& model, const AccumulatorOptions& options = {});
  ~Accumulator();

  // Computes the gradients of one micro-batch of this rank. loss: one element, the mean over the micro-batch, in
  // fp32; a loss in bf16 or half that would round weight x loss scale is refused. Do not divide it by micro_steps
  // or ranks, because step() does: gradients would be too small by that factor, and no check can notice.
  // weight: the weight of the micro-batch in the mean, such as its number of tokens; at least 0. So micro-batches
  // and ranks
  // may differ in it, and the step takes the mean over all tokens. With weight 0 the loss and its
  // gradients count for nothing, also where they are NaN, as the mean over no tokens is.
  void backward(const torch::Tensor& loss, double weight = 1);

  // Other forms of backward(), for stages of a pipeline (zero/accumulation/stage_backwards.h).
  class StageBackwards stage_backwards();

  // Steps these zeropage::Optimizers of the model with the mean gradient, or skips the step; then zeroes all
  // gradients. An error of the device in the step before may be thrown here.
  template <std::derived_from<torch::optim::Optimizer>... More>
  StepReport step(torch::optim::Optimizer& optimizer, More&... more) {
    return enqueue_step({&optimizer, &more...}).report();
  }
  // The same, but this call does not wait for the device: the report does, when it is read. If the report of a step
  // is read after the next one is enqueued, the host is always ahead of an accelerator. It is the report of this
  // step, whenever it is read.
  template <std::derived_from<torch::optim::Optimizer>... More>
  EnqueuedStep enqueue_step(torch::optim::Optimizer& optimizer, More&... more) {
    return enqueue_step({&optimizer, &more...});
  }

  // Drops what was accumulated since the last step, on all ranks alike. Use it after a backward() that threw before
  // gradients were exchanged.
  void abandon();

  // For the next steps, such as a last one of an epoch; between steps only.
  void set_micro_steps(int64_t micro_steps);
  int64_t micro_steps() const;
  // Backwards since the last step.
  int64_t micro_step() const;

  // This rank's mean loss of the micro-batches since the last step, or of that step; fp64 [],
  // on the loss's device. Undefined before the first, and where none had weight.
  torch::Tensor loss() const;

  bool reduces_each() const;
  // The scaler, to be saved and loaded with the training state. Waits for the verdict on the last step.
  accumulate::LossScaler& loss_scaler();
  // Null: norms are not judged.
  accumulate::NormSpikes* norm_spikes();

 private:
  struct Parts;

  EnqueuedStep enqueue_step(const std::vector<torch::optim::Optimizer*>& given);

  const std::unique_ptr<Parts> parts_;
};

}  // namespace zeropage

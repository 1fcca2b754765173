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
// Backwards add up sums over ranks and micro-steps. What makes the mean of them, and undoes the
// scale of the loss, and clips, is one factor, which the optimizer takes in its pass: 1 / (weight of
// all micro-batches of all ranks x loss scale) x clip factor. Only gradients that travel in fp16
// are divided by the number of ranks in the reduction, before they are rounded.
//
// In a step all ranks agree first: on the weight, the norm (zero/gradient_norm.h) and whether
// gradients are finite. A step that is skipped leaves weights and optimizer state as they were, bit
// for bit.
//
// On an accelerator the update waits for the host where gradients decide something: with clip_norm,
// clip_value, norm_spikes, a loss scale that changes or stops, an optimizer by its class or offloaded.
// Otherwise the device leaves out an update with gradients that are not finite. step() then waits
// for its report with the update enqueued already, and enqueue_step() does not wait at all.
//
// Before the last backward() of a step p.grad() is a sum so far. Behind it, a script that looks at gradients sees their mean
// over micro-batches and ranks, without the scale of the loss, and may change it: all of p.grad() becomes the mean at the
// first operator on one that does more than to multiply or to zero, at gradient_norm(), or at clip_grad_norm_(). That is
// collective, at stage 0 too. Gradients that are kept in half, and scaled, are not looked at: it throws.
// With a loss scale that changes, the first look finds out whether all gradients are finite, at the cost of reading them.
// If one is not, step() makes no step and lowers the scale, whatever the script has made of it since, and clip_grad_norm_()
// returns the norm.
// optimizer.step() is refused.
// Lifetime: shares the pages and the reducer with the model; either may go first. Dropping it drops the
// gradients of an accumulation that is open.
// Collective: construction, backward(), step(). Threads: the training thread.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <vector>

#include <torch/optim/optimizer.h>

#include "zero/accumulator_options.h"
#include "zero/distributed_data_parallel.h"
#include "zero/step_report.h"

namespace zeropage {

class Accumulator {
 public:
  // Throws where options contradict each other or the model's, or ranks differ.
  explicit Accumulator(DistributedDataParallelBase& model, const AccumulatorOptions& options = {});
  ~Accumulator();
  Accumulator(const Accumulator&) = delete;
  Accumulator& operator=(const Accumulator&) = delete;

  // The gradients of one micro-batch of this rank. loss: one element, the mean over the micro-batch,
  // in fp32; one in bf16 or half that would round weight x loss scale is refused. Not divided by
  // micro_steps or ranks, which step() does: a loss that is divided as well gives gradients that are
  // too small by that factor, and nothing can notice.
  // weight: what the mean is over, say its number of tokens; at least 0. So micro-batches and ranks
  // may differ in it, and the step takes the mean over all tokens. With weight 0 the loss and its
  // gradients count for nothing, also where they are NaN, as the mean over no tokens is.
  void backward(const torch::Tensor& loss, double weight = 1);

  // Other forms of backward(), for stages of a pipeline (zero/accumulation/stage_backwards.h).
  class StageBackwards stage_backwards();

  // One step of these zeropage::Optimizers of the model with the mean gradient, or none; then all
  // gradients are zeroed. What the device failed at in the step before may be thrown here.
  template <std::derived_from<torch::optim::Optimizer>... More>
  StepReport step(torch::optim::Optimizer& optimizer, More&... more) {
    return enqueue_step({&optimizer, &more...}).report();
  }
  // The same, but this call does not wait for the device: the report does, when it is read. Read
  // the report of one step when the next is enqueued, and the host is always ahead of an
  // accelerator. It is the report of this step, whenever it is read.
  template <std::derived_from<torch::optim::Optimizer>... More>
  EnqueuedStep enqueue_step(torch::optim::Optimizer& optimizer, More&... more) {
    return enqueue_step({&optimizer, &more...});
  }

  // Drops what was accumulated since the last step, on all ranks alike; say after a backward() that
  // threw before gradients were exchanged.
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
  // To be saved and loaded with the training state.
  // Waits for the verdict on the last step.
  accumulate::LossScaler& loss_scaler();
  // Null: norms are not judged.
  accumulate::NormSpikes* norm_spikes();

 private:
  struct Parts;

  EnqueuedStep enqueue_step(const std::vector<torch::optim::Optimizer*>& given);

  const std::unique_ptr<Parts> parts_;
};

}  // namespace zeropage

#include "zero/gradients/step_gradients.h"

#include <torch/csrc/autograd/grad_mode.h>

#include "zeropage/check.h"

namespace zeropage::zero {

std::vector<size_t> StepGradients::parameters() const {
  std::vector<size_t> parameters;
  for (const size_t index : reducer_->training().all()) {
    if (has(index)) parameters.push_back(index);
  }
  return parameters;
}

StepPart StepGradients::part_of_step() const {
  const StepPart part = reducer_->plan().part;
  ZP_CHECK(
      part != StepPart::kNone,
      "step() in the middle of an accumulation, whose gradients are sums so far: run the other "
      "micro-batches and call accumulator.step(optimizer), or accumulator.abandon()");
  return part;
}

// Where part_of_step() is kOver, the first of several optimizers has begun a cycle, and may have multiplied its gradients.
void StepGradients::prepare() {
  if (part_of_step() == StepPart::kOver) return;
  reducer_->reduce();
  look_.at_gradients();
  take_over_others();
}

void StepGradients::prepare_seen() {
  bool is_as_seen = look_.is_of_all_that_train();
  const bool is_over = part_of_step() == StepPart::kOver;
  if (!is_over) {
    is_as_seen = is_as_seen && reducer_->is_reduced();
    reducer_->reduce();
  }
  if (!is_as_seen) look_.at_gradients();
  if (!is_over) take_over_others();
}

void StepGradients::take_over_others() {
  const torch::NoGradGuard no_grad;
  GradientBuckets& buckets = reducer_->buckets();
  bool any_by_hand = false;
  for (const size_t index : look_.others()) {
    at::Tensor& gradient = reducer_->training().gradient(index);
    ZP_CHECK(!reducer_->on_reduced(), "parameter \"", reducer_->training().name(index),
             "\": p.grad() was replaced after backward, which has made the step with it already "
             "(options.offload.step); use StepWhen::kInStep to change gradients");
    if (reducer_->has_averaged(index)) {
      gradient = buckets.reduced().replaced(index, gradient);
    } else {
      any_by_hand = true;
    }
  }
  // Where backward gave none, what a script put there is this rank's own, whether it did so before backward or after.
  if (any_by_hand) {
    reducer_->begin_cycle();
    reducer_->reduce();
    look_.at_gradients();
  }
  take_over_writes(*reducer_);
}

void StepGradients::prepare_mean() {
  BackwardPlan plan = reducer_->plan();
  plan.part = StepPart::kLastMicroStep;
  reducer_->set_plan(plan);
  plan.part = StepPart::kNone;
  try {
    prepare();
  } catch (...) {
    reducer_->set_plan(plan);
    throw;
  }
  reducer_->set_plan(plan);
}

void StepGradients::prepare_to_look() {
  if (!mean_.is_offered()) return prepare();
  mean_.make();
  prepare_mean();
}

void StepGradients::change(const std::function<void(const at::Tensor& owned)>& change) {
  ZP_CHECK(!reducer_->on_reduced(),
           "gradients are to be clipped or changed after backward, which has made the "
           "step with them already (options.offload.step); use StepWhen::kInStep");
  const torch::NoGradGuard no_grad;
  for (const size_t page : reducer_->training().pages()) {
    const at::Tensor gradient = owned(page);
    if (!gradient.defined()) continue;
    reducer_->buckets().before_write(page);
    change(gradient);
  }
  reducer_->buckets().note_reduced();
}

void StepGradients::gather(const std::vector<size_t>& parameters, paging::Pins& pins) {
  ZP_CHECK(reducer_->is_reduced(),
           "GatheredGradients: expected gradients that a backward has averaged, but the last one "
           "was under no_sync(), or there was none since step(); p.grad() is this rank's own then");
  std::vector<size_t> reduced;
  for (const size_t index : parameters) {
    if (has(index)) reduced.push_back(index);
  }
  if (!reduced.empty()) reducer_->buckets().reduced().gather(reduced, pins);
}

}  // namespace zeropage::zero

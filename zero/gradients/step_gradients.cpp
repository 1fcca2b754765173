#include "zero/gradients/step_gradients.h"

#include <torch/csrc/autograd/grad_mode.h>

#include "zero/parameter_scan.h"
#include "zeropage/check.h"

namespace zeropage::zero {

std::vector<size_t> StepGradients::parameters() const {
  std::vector<size_t> parameters;
  for (const size_t index : reducer_->training().all()) {
    if (has(index)) parameters.push_back(index);
  }
  return parameters;
}

std::vector<uint8_t> StepGradients::presence() const {
  const TrainingParameters& training = reducer_->training();
  std::vector<uint8_t> presence(training.size());
  const std::vector<size_t>& all = training.all();
  for_each_in_parallel(all.size(), [&](size_t i) {
    presence[all[i]] = static_cast<uint8_t>(training.gradient(all[i]).defined());
  });
  return presence;
}

void StepGradients::prepare() {
  const StepPart part = reducer_->plan().part;
  ZP_CHECK(
      part != StepPart::kNone,
      "step() in the middle of an accumulation, whose gradients are sums so far: run the other "
      "micro-batches and call accumulator.step(optimizer), or accumulator.abandon()");
  // The first of several optimizers has begun a cycle, and may have multiplied its gradients.
  if (part == StepPart::kOver) return;
  reducer_->reduce();
  const torch::NoGradGuard no_grad;
  GradientBuckets& buckets = reducer_->buckets();
  bool any_by_hand = false;
  const std::vector<size_t>& all = reducer_->training().all();
  const auto is_set_by_script = [&](size_t i) {
    const at::Tensor& gradient = reducer_->training().gradient(all[i]);
    return gradient.defined() && !buckets.reduced().is(all[i], gradient);
  };
  // There is seldom one.
  for (size_t i = first_in_parallel(all.size(), is_set_by_script); i < all.size(); ++i) {
    if (!is_set_by_script(i)) continue;
    const size_t index = all[i];
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

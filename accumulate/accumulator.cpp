#include "zeropage/accumulator.h"

#include <algorithm>

#include "accumulate/accumulated_step.h"
#include "accumulate/accumulator_fields.h"
#include "accumulate/stage_backwards.h"
#include "zero/model_parts.h"

namespace zeropage {
namespace {

accumulate::LossScalerOptions scaler_options(const AccumulatorOptions& options,
                                             const zero::ParameterPages& pages) {
  const bool has_half = std::any_of(
      pages.layouts().begin(), pages.layouts().end(),
      [](const zero::PageLayout& page) { return page.requires_grad && page.dtype == c10::kHalf; });
  const bool half = accumulate::on_any_stage(pages, has_half);
  if (options.loss_scaler) return *options.loss_scaler;
  return half ? accumulate::LossScalerOptions() : accumulate::LossScalerOptions::fixed(1);
}

// With the loss scaler that they come to on this model.
AccumulatorOptions with_scaler(AccumulatorOptions options, const zero::ParameterPages& pages) {
  options.loss_scaler = scaler_options(options, pages);
  return options;
}

}  // namespace

struct Accumulator::Parts {
  Parts(const zero::ShardedModel& sharded, const AccumulatorOptions& options)
      : verdicts(*options.loss_scaler, options.norm_spikes),
        micro_steps(sharded, options),
        step(sharded, options, micro_steps, verdicts) {
    // What the options come to on this model.
    AccumulatorOptions seen = options;
    seen.reduce = micro_steps.reduction().when;
    std::vector<std::string> lines;
    memory::describe_fields("", seen, lines);
    zero::check_agreement(*sharded.pages, "the accumulator", lines);
    zero::check_stages_agree(*sharded.pages, "the accumulator", lines);
  }

  accumulate::StepVerdicts verdicts;
  accumulate::MicroSteps micro_steps;
  accumulate::AccumulatedStep step;
};

Accumulator::Accumulator(const ModelRef& model, const AccumulatorOptions& options)
    : parts_(std::make_unique<Parts>(model->sharded(),
                                     with_scaler(options, *model->sharded().pages))) {}

Accumulator::~Accumulator() = default;

void Accumulator::backward(const torch::Tensor& loss, double weight) {
  parts_->micro_steps.backward(loss, weight, parts_->verdicts.scaler().scale());
}

accumulate::StageBackwards Accumulator::stage_backwards() {
  return {parts_->micro_steps, parts_->verdicts};
}

EnqueuedStep Accumulator::enqueue_step(const std::vector<torch::optim::Optimizer*>& given) {
  return parts_->step.enqueue(given);
}

void Accumulator::abandon() {
  if (parts_->micro_steps.made() > 0) parts_->micro_steps.end();
}

void Accumulator::set_micro_steps(int64_t micro_steps) {
  parts_->micro_steps.set_count(micro_steps);
}

int64_t Accumulator::micro_steps() const {
  return parts_->micro_steps.count();
}

int64_t Accumulator::micro_step() const {
  return parts_->micro_steps.made();
}

torch::Tensor Accumulator::loss() const {
  return parts_->micro_steps.loss();
}

const MicroStepReduction& Accumulator::reduction() const {
  return parts_->micro_steps.reduction();
}

accumulate::LossScaler& Accumulator::loss_scaler() {
  parts_->verdicts.resolve_verdict();
  return parts_->verdicts.scaler();
}

accumulate::NormSpikes* Accumulator::norm_spikes() {
  return parts_->verdicts.spikes();
}

}  // namespace zeropage

#include "accumulate/micro_steps.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ATen.h>

#include "accumulate/tied_gradients.h"
#include "zero/norms/not_finite.h"
#include "zero/plan/byte_plan.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::accumulate {
namespace {

// Whether a rank may reduce a parameter of this dtype in halves.
bool may_reduce_halves(const Options& options, c10::ScalarType dtype) {
  const bool is_cast = dtype == c10::kFloat && options.compute_dtype;
  return reduce_dtype_of(options, dtype) == c10::kHalf ||
         (is_cast && reduce_dtype_of(options, *options.compute_dtype) == c10::kHalf);
}

// Sums of halves overflow where their mean does not. The stages of a pipeline add up what they have, so they do alike,
// whatever this one's pages are.
comm::ReduceOp op_for(const zero::ParameterPages& pages, const Options& options) {
  bool half = false;
  if (zero::pipeline_world_of(pages) != nullptr) {
    const std::vector<TensorOfModel>& of_model = pages.part()->parameters;
    half = std::any_of(of_model.begin(), of_model.end(), [&](const TensorOfModel& parameter) {
      return may_reduce_halves(options, parameter.dtype);
    });
  } else {
    half = std::any_of(pages.layouts().begin(), pages.layouts().end(), [&](const auto& page) {
      return page.requires_grad && reduce_dtype_of(options, page.dtype) == c10::kHalf;
    });
  }
  return half ? comm::ReduceOp::kMean : comm::ReduceOp::kSum;
}

// Then autograd adds micro-steps up where the gradients lie, to the same bits: no copy, and nothing set aside.
bool nothing_travels(const zero::ShardedModel& sharded) {
  const zero::ParameterPages& pages = *sharded.pages;
  return pages.world().size() == 1 && sharded.options.offload.optimizer == memory::Tier::kDevice &&
         std::all_of(
             pages.plan().pages().begin(), pages.plan().pages().end(),
             [](const zero::PagePlan& page) { return page.reduce_dtype == page.gradient_dtype; });
}

const AccumulatorOptions& checked(const AccumulatorOptions& options) {
  ZP_CHECK(options.micro_steps > 0, "AccumulatorOptions::micro_steps: expected 1 or more, got ",
           options.micro_steps);
  ZP_CHECK(options.gradient_budget_bytes >= 0,
           "AccumulatorOptions::gradient_budget_bytes: expected 0 (none) or more, got ",
           options.gradient_budget_bytes);
  ZP_CHECK(!options.clip_norm || *options.clip_norm > 0,
           "AccumulatorOptions::clip_norm: expected a norm above 0, got ", *options.clip_norm);
  ZP_CHECK(!options.clip_value || *options.clip_value > 0,
           "AccumulatorOptions::clip_value: expected a value above 0, got ", *options.clip_value);
  ZP_CHECK(!options.clip_norm || !options.clip_value,
           "AccumulatorOptions: clip_norm and clip_value are both set, and which comes first would "
           "matter; choose one");
  return options;
}

// A loss in fp32 or fp64 rounds it as it does everything, and an infinite one lowers the loss scale.
bool seed_is_exact(c10::ScalarType dtype, double factor) {
  if (!is_low_precision(dtype)) return true;
  const double carried = dtype == c10::kHalf
                             ? static_cast<double>(c10::Half(static_cast<float>(factor)))
                             : static_cast<double>(c10::BFloat16(static_cast<float>(factor)));
  return carried == factor || std::isinf(carried);
}

MicroStepReduction chosen_reduction(const zero::ShardedModel& sharded,
                                    const AccumulatorOptions& asked) {
  using enum ReduceMicroSteps;
  const bool is_invariant = sharded.options.world_invariant;
  ZP_CHECK(!is_invariant || asked.reduce != kOnce,
           "AccumulatorOptions::reduce: ReduceMicroSteps::kOnce adds up a rank's micro-steps "
           "before the ranks', but Options::world_invariant adds up the ranks' first; use "
           "ReduceMicroSteps::kEach or ReduceMicroSteps::kAuto");
  if (is_invariant) return {kEach, "Options::world_invariant adds up the ranks first"};
  if (asked.reduce != kAuto) return {asked.reduce, "AccumulatorOptions::reduce asks for it"};
  const zero::BytePlan& plan = sharded.pages->plan();
  if (plan.gradients() != zero::Sharing::kSharded) {
    return {kOnce, "each rank has whole gradients at this stage"};
  }
  if (nothing_travels(sharded)) return {kOnce, "this rank shares the model with no other"};
  int64_t whole_bytes = 0;
  for (const zero::PagePlan& page : plan.pages()) whole_bytes += page.own_gradient_bytes;
  const int64_t budget_bytes = asked.gradient_budget_bytes;
  const std::string whole = "whole gradients take " + memory::format_bytes(whole_bytes);
  if (whole_bytes <= budget_bytes) {
    return {kOnce, whole + " of a gradient_budget_bytes of " + memory::format_bytes(budget_bytes)};
  }
  const std::string more =
      budget_bytes == 0 ? ", and there is no gradient_budget_bytes"
                        : " and gradient_budget_bytes are " + memory::format_bytes(budget_bytes);
  return {kEach, "gradients are sharded at this stage: " + whole + more};
}

// All stages do what one needs.
MicroStepReduction over_stages(const zero::ParameterPages& pages, MicroStepReduction own) {
  const bool is_each = own.when == ReduceMicroSteps::kEach;
  if (on_any_stage(pages, is_each) == is_each) return own;
  return {ReduceMicroSteps::kEach, "another stage of the pipeline reduces each"};
}

}  // namespace

bool on_any_stage(const zero::ParameterPages& pages, bool needs_it) {
  const comm::World* const stages = zero::pipeline_world_of(pages);
  if (stages == nullptr || stages->size() == 1) return needs_it;
  return stages->max(needs_it ? 1.0 : 0.0) > 0;
}

at::Tensor seed_of(const at::Tensor& loss, double weight, double scale) {
  ZP_CHECK(loss.defined() && loss.numel() == 1 && loss.requires_grad(),
           "accumulator.backward(): expected a loss of one element that requires grad, got ",
           loss.defined() ? c10::str("sizes ", loss.sizes(),
                                     loss.requires_grad() ? "" : " without requires_grad")
                          : "an undefined tensor");
  ZP_CHECK(std::isfinite(weight) && weight >= 0,
           "accumulator.backward(): expected a finite weight of 0 or more, got ", weight);
  const double factor = weight * scale;
  const at::Tensor seed = at::full_like(loss.detach(), factor);
  ZP_CHECK(seed_is_exact(loss.scalar_type(), factor), "accumulator.backward(): a loss in ",
           loss.scalar_type(), " cannot carry its weight ", weight, " times the loss scale ", scale,
           " exactly; compute the loss in fp32, criterion(output.to(torch::kFloat), ...)");
  return seed;
}

std::shared_ptr<const WeightlessLoss> weightless(const at::Tensor& loss, double weight) {
  return weight == 0 ? std::make_shared<WeightlessLoss>(loss) : nullptr;
}

MicroSteps::MicroSteps(const zero::ShardedModel& sharded, const AccumulatorOptions& options)
    : sharded_(sharded),
      op_(op_for(*sharded.pages, sharded.options)),
      reduction_(over_stages(*sharded.pages, chosen_reduction(sharded, checked(options)))),
      incomplete_(options.incomplete),
      scale_changes_(options.loss_scaler && changes(*options.loss_scaler)),
      count_(options.micro_steps) {
  sharded_.facts->note_micro_steps(count_);
}

bool MicroSteps::step_in_backward() const {
  return sharded_.options.offload.step == StepWhen::kInBackward;
}

void MicroSteps::begin() {
  accumulation_ = std::make_unique<GradientAccumulation>(sharded_.reducer, sharded_.gradients, op_);
  is_mean_ = false;
  sharded_.sums->forget_scale();
  overflow_.reset();
  weight_ = {};
  loss_ = {};
}

void MicroSteps::backward(const at::Tensor& loss, double weight, double scale) {
  const at::Tensor seed = seed_of(loss, weight, scale);
  run({loss.detach(), weight, scale, weightless(loss, weight)}, [&] { loss.backward(seed); });
}

void MicroSteps::begin_micro_step() {
  ZP_CHECK(made_ < count_, "accumulator.backward(): expected step() after ", count_,
           " micro-batches, got backward() number ", made_ + 1, "; raise micro_steps, or step");
  if (made_ == 0) {
    begin();
  } else {
    accumulation_->check_goes_on();
  }
  // Counted before it has ended: one that throws leaves gradients behind, too.
  ++made_;
}

// The weight of a micro-step is the loss's to say. A micro-step without a loss counts nothing, and nothing of it is
// discarded.
void MicroSteps::run(const MicroStepShare& share, const std::function<void()>& backward) {
  begin_micro_step();
  if (share.loss.defined()) weight_.add(share.weight);
  {
    GradientAccumulation::MicroStep micro_step(*accumulation_, plan(share));
    if (share.loss.defined()) loss_.add(share.loss, share.weight);
    backward();
    micro_step.has_ended();
  }
  if (made_ < count_ || step_in_backward()) return;
  accumulation_->offer_mean({.make = [this, scale = share.scale] { make_mean(scale); },
                             .is_skipped_at_overflow = scale_changes_});
}

void MicroSteps::finish() {
  accumulation_->finish();
  if (!is_mean_) add_tied_gradients(*sharded_.pages, *sharded_.gradients);
}

void MicroSteps::make_mean(double scale) {
  const std::vector<zero::PageLayout>& pages = sharded_.pages->layouts();
  const auto in_half = std::find_if(pages.begin(), pages.end(), [&](const zero::PageLayout& page) {
    return page.requires_grad &&
           sharded_.pages->plan()[static_cast<size_t>(&page - pages.data())].gradient_dtype ==
               c10::kHalf;
  });
  ZP_CHECK(in_half == pages.end() || scale == 1, "p.grad() of page \"", in_half->name,
           "\" is looked at between the last backward() of an accumulation and its step(): it is "
           "in half, and "
           "multiplied by the loss scale ",
           scale,
           ", without which half cannot hold small values; expected nobody to look; clip by "
           "AccumulatorOptions::clip_norm or clip_value, and read the norm in the StepReport");
  add_tied_gradients(*sharded_.pages, *sharded_.gradients);
  const double weight =
      scale_changes_ ? look_for_overflow().value() : sharded_.sums->sum_weight(weight_).value();
  if (weight > 0) {
    const double factor = mean_factor(weight, scale);
    sharded_.gradients->change([factor](const at::Tensor& owned) { owned.mul_(factor); });
  }
  is_mean_ = true;
  // What the script multiplies them by counts from here on.
  if (zero::pipeline_world_of(*sharded_.pages) != nullptr) sharded_.sums->watch_scale();
}

// A script may clip each element, and an infinity would be a number when the step looks. Returns the weight of all ranks.
optim::ExactSum MicroSteps::look_for_overflow() {
  const std::vector<int> one_group(sharded_.pages->parameters().size(), 0);
  const zero::NormSums sums = sharded_.sums->sum(one_group, 1, weight_);
  if (!sums.all_finite) {
    overflow_ = {.not_finite = zero::names_over_stages(*sharded_.pages, sums.not_finite),
                 .norm = std::sqrt(sums.squares_of_group.front().value())};
  }
  return sums.weight;
}

zero::BackwardPlan MicroSteps::plan(const MicroStepShare& share) const {
  const bool is_last = made_ == count_;
  const bool reduces_each = reduction_.when == ReduceMicroSteps::kEach;
  zero::BackwardPlan plan{
      .collect = reduces_each || is_last ? zero::Collect::kForReduction : zero::Collect::kLocally,
      .part = is_last ? zero::StepPart::kLastMicroStep : zero::StepPart::kMicroStep,
      .discards = share.weightless && !share.weightless->meets_others()};
  if (is_last && step_in_backward()) {
    const double of_all = sharded_.sums->sum_weight(weight_).value();
    plan.factor = mean_factor(of_all, share.scale);
    // Then there will be no step.
    if (of_all == 0) plan.part = zero::StepPart::kMicroStep;
  }
  return plan;
}

void MeanLoss::add(const at::Tensor& loss, double weight) {
  if (weight == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor weighted = loss.detach().to(at::kDouble).reshape({}) * weight;
  sum_ = sum_.defined() ? sum_ + weighted : weighted;
  weight_ += weight;
}

at::Tensor MeanLoss::value() const {
  return sum_.defined() ? sum_ / weight_ : at::Tensor();
}

void MicroSteps::check_complete() const {
  if (made_ == count_) return;
  const std::string found =
      c10::str("accumulator.step(): expected ", count_, " micro-batches, got ", made_);
  ZP_CHECK(made_ > 0 && incomplete_ == IncompleteStep::kWarn, found,
           "; call backward() for the others, set_micro_steps() before a step of fewer, or "
           "abandon()");
  TORCH_WARN(memory::owner_prefix(), found, "; this step is the mean of those");
}

double MicroSteps::mean_factor(double weight, double scale) const {
  if (is_mean_) return 1;
  const double ranks = op_ == comm::ReduceOp::kMean ? sharded_.pages->world().size() : 1;
  return ranks / (weight * scale);
}

void MicroSteps::end() {
  made_ = 0;
  accumulation_->end();
}

void MicroSteps::set_count(int64_t count) {
  ZP_CHECK(count > 0, "accumulator.set_micro_steps(): expected 1 or more, got ", count);
  ZP_CHECK(made_ == 0, "accumulator.set_micro_steps(): ", made_,
           " micro-batches of a step are there already; set it between steps");
  count_ = count;
  sharded_.facts->note_micro_steps(count_);
}

}  // namespace zeropage::accumulate

namespace zeropage {

std::string MicroStepReduction::to_string() const {
  const bool is_each = when == ReduceMicroSteps::kEach;
  return (is_each ? "at each micro-step: " : "once a step: ") + why;
}

}  // namespace zeropage

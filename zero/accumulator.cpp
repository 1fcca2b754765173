#include "zero/accumulator.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "memory/bytes.h"
#include "memory/check.h"
#include "zero/accumulator_fields.h"
#include "zero/gradient_norm.h"
#include "zero/update/sharded_optimizer.h"

namespace zeropage {
namespace {

bool any_page(const ParameterPages& pages, const std::function<bool(const PageLayout&)>& holds) {
  return std::any_of(pages.layouts().begin(), pages.layouts().end(),
                     [&](const PageLayout& page) { return page.requires_grad && holds(page); });
}

accumulate::LossScalerOptions scaler_options(const AccumulatorOptions& options,
                                             const ParameterPages& pages) {
  if (options.loss_scaler) return *options.loss_scaler;
  const bool half =
      any_page(pages, [](const PageLayout& page) { return page.dtype == c10::kHalf; });
  return half ? accumulate::LossScalerOptions() : accumulate::LossScalerOptions::fixed(1);
}

// Sums of halves overflow where their mean does not.
comm::ReduceOp op_for(const ParameterPages& pages, const Options& options) {
  const bool half = any_page(pages, [&](const PageLayout& page) {
    return reduce_dtype_of(options, page.dtype) == c10::kHalf;
  });
  return half ? comm::ReduceOp::kMean : comm::ReduceOp::kSum;
}

void validate(const AccumulatorOptions& options) {
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
}

// A loss in fp32 or fp64 rounds it as it does everything, and an infinite one lowers the loss scale.
bool seed_is_exact(c10::ScalarType dtype, double factor) {
  if (!is_low_precision(dtype)) return true;
  const double carried = dtype == c10::kHalf
                             ? static_cast<double>(c10::Half(static_cast<float>(factor)))
                             : static_cast<double>(c10::BFloat16(static_cast<float>(factor)));
  return carried == factor || std::isinf(carried);
}

}  // namespace

Accumulator::Accumulator(DistributedDataParallelBase& model, const AccumulatorOptions& options)
    : sharded_(model.sharded_parameters()),
      op_(op_for(*sharded_.pages, sharded_.options)),
      options_(options),
      scaler_(scaler_options(options, *sharded_.pages)) {
  validate(options_);
  if (options_.norm_spikes) spikes_.emplace(*options_.norm_spikes);
  reduces_each_ = chooses_each();
  std::vector<std::string> names;
  for (const PlacedParameter& placed : sharded_.pages->parameters()) {
    names.push_back(placed.parameter.name());
  }
  names_ = std::make_shared<const std::vector<std::string>>(std::move(names));
  check_can_step_in_backward();
  check_agreement();
}

Accumulator::~Accumulator() = default;

bool Accumulator::chooses_each() const {
  const Options& options = sharded_.options;
  ZP_CHECK(!options.world_invariant || options_.reduce != ReduceMicroSteps::kOnce,
           "AccumulatorOptions::reduce: kOnce adds up a rank's micro-steps before the ranks', but "
           "Options::world_invariant adds up the ranks' first; use kEach or kAuto");
  if (options.world_invariant || options_.reduce == ReduceMicroSteps::kEach) return true;
  if (options_.reduce == ReduceMicroSteps::kOnce) return false;
  int64_t whole_bytes = 0;
  for (const PagePlan& page : sharded_.pages->plan().pages())
    whole_bytes += page.own_gradient_bytes;
  return whole_bytes > options_.gradient_budget_bytes;
}

bool Accumulator::steps_in_backward() const {
  return sharded_.options.offload.step == StepWhen::kInBackward;
}

// The step is made before all gradients are known.
void Accumulator::check_can_step_in_backward() const {
  if (!steps_in_backward()) return;
  ZP_CHECK(!options_.clip_norm && !options_.clip_value && !options_.norm_spikes,
           "AccumulatorOptions: clip_norm, clip_value and norm_spikes look at all gradients before "
           "the step, but Options::offload.step is kInBackward; use StepWhen::kInStep");
  ZP_CHECK(scaler_.options().backoff_factor == 1 && scaler_.options().growth_factor == 1,
           "AccumulatorOptions::loss_scaler: a scale that changes skips steps whose gradients "
           "overflow, but Options::offload.step is kInBackward; use LossScalerOptions::fixed(), or "
           "StepWhen::kInStep");
}

void Accumulator::check_agreement() const {
  // What they come to on this model.
  AccumulatorOptions seen = options_;
  seen.reduce = reduces_each_ ? ReduceMicroSteps::kEach : ReduceMicroSteps::kOnce;
  seen.loss_scaler = scaler_.options();
  std::vector<std::string> lines;
  memory::describe_fields("", seen, lines);
  sharded_.pages->world().check_agreement("the accumulator", lines);
}

void Accumulator::begin() {
  accumulation_ = std::make_unique<GradientAccumulation>(sharded_.reducer, sharded_.gradients, op_);
  weight_ = {};
  loss_sum_.reset();
  loss_weight_ = 0;
}

void Accumulator::backward(const torch::Tensor& loss, double weight) {
  ZP_CHECK(loss.defined() && loss.numel() == 1 && loss.requires_grad(),
           "accumulator.backward(): expected a loss of one element that requires grad, got ",
           loss.defined() ? c10::str("sizes ", loss.sizes(),
                                     loss.requires_grad() ? "" : " without requires_grad")
                          : "an undefined tensor");
  ZP_CHECK(std::isfinite(weight) && weight >= 0,
           "accumulator.backward(): expected a finite weight of 0 or more, got ", weight);
  const double factor = weight * scaler_.scale();
  const torch::Tensor seed = torch::full_like(loss.detach(), factor);
  ZP_CHECK(seed_is_exact(loss.scalar_type(), factor), "accumulator.backward(): a loss in ",
           loss.scalar_type(), " cannot carry its weight ", weight, " times the loss scale ",
           scaler_.scale(),
           " exactly; compute the loss in fp32, criterion(output.to(torch::kFloat), "
           "...)");
  ZP_CHECK(micro_step_ < options_.micro_steps, "accumulator.backward(): expected step() after ",
           options_.micro_steps, " micro-batches, got backward() number ", micro_step_ + 1,
           "; raise micro_steps, or step");
  if (micro_step_ == 0) begin();
  // Counted before it has ended: one that throws leaves gradients behind, too.
  ++micro_step_;
  weight_.add(weight);
  const GradientAccumulation::MicroStep micro_step(*accumulation_, plan_of_micro_step(weight));
  add_loss(loss, weight);
  loss.backward(seed);
}

BackwardPlan Accumulator::plan_of_micro_step(double weight) const {
  const bool is_last = micro_step_ == options_.micro_steps;
  BackwardPlan plan{
      .collect = reduces_each_ || is_last ? Collect::kForReduction : Collect::kLocally,
      .part = is_last ? StepPart::kLastMicroStep : StepPart::kMicroStep,
      .discards = weight == 0};
  if (is_last && steps_in_backward()) {
    const double of_all = sum_over_ranks(sharded_.pages->world(), weight_).value();
    plan.factor = mean_factor(of_all);
    // Then there will be no step.
    if (of_all == 0) plan.part = StepPart::kMicroStep;
  }
  return plan;
}

void Accumulator::add_loss(const torch::Tensor& loss, double weight) {
  if (weight == 0) return;
  const torch::NoGradGuard no_grad;
  const torch::Tensor weighted = loss.detach().to(torch::kFloat64).reshape({}) * weight;
  loss_sum_ = loss_sum_.defined() ? loss_sum_ + weighted : weighted;
  loss_weight_ += weight;
}

torch::Tensor Accumulator::loss() const {
  return loss_sum_.defined() ? loss_sum_ / loss_weight_ : torch::Tensor();
}

Accumulator::Optimizers Accumulator::checked(
    const std::vector<torch::optim::Optimizer*>& given) const {
  Optimizers optimizers;
  for (torch::optim::Optimizer* optimizer : given) {
    auto* const sharded = dynamic_cast<ShardedOptimizer*>(optimizer);
    ZP_CHECK(sharded != nullptr && sharded->updates(*sharded_.pages),
             "accumulator.step(): expected a zeropage::Optimizer of the accumulator's model, got ",
             sharded == nullptr ? "another class" : "one of another model",
             ", which would step with sums instead of the mean; make it of this model");
    optimizers.push_back(sharded);
  }
  return optimizers;
}

// All parameters.
std::vector<int> Accumulator::one_group() const {
  return std::vector<int>(sharded_.pages->parameters().size(), 0);
}

void Accumulator::check_complete() const {
  if (micro_step_ == options_.micro_steps) return;
  const std::string found = c10::str("accumulator.step(): expected ", options_.micro_steps,
                                     " micro-batches, got ", micro_step_);
  ZP_CHECK(micro_step_ > 0 && options_.incomplete == IncompleteStep::kWarn, found,
           "; call backward() for the others, set_micro_steps() before a step of fewer, or "
           "abandon()");
  TORCH_WARN(memory::owner_prefix(), found, "; this step is the mean of those");
}

double Accumulator::mean_factor(double weight) const {
  const double ranks = op_ == comm::ReduceOp::kMean ? sharded_.pages->world().size() : 1;
  return ranks / (weight * scaler_.scale());
}

// Norms of the mean gradient; skips what no step can be made of.
StepReport Accumulator::measure() {
  StepReport report;
  const GradientSums sums = sharded_.sums->sum(one_group(), 1, weight_);
  report.weight = sums.weight.value();
  report.loss_scale = report.next_loss_scale = scaler_.scale();
  if (!sums.not_finite.empty()) {
    report.not_finite = names_of(*sharded_.pages, sums.not_finite);
    report.skipped = Skipped::kNotFinite;
  } else if (report.weight == 0) {
    report.skipped = Skipped::kNoWeight;
    return report;
  }
  report.norm = report.clipped_norm =
      std::sqrt(sums.squares_of_group.front().value()) * mean_factor(report.weight);
  return report;
}

void Accumulator::apply(StepReport& report, const Optimizers& optimizers) {
  double factor = mean_factor(report.weight);
  if (options_.clip_norm) {
    const double clip = clip_factor(report.norm, *options_.clip_norm);
    factor *= clip;
    report.clipped_norm *= clip;
  }
  if (options_.clip_value) {
    const double bound = *options_.clip_value;
    sharded_.gradients->change(
        [&](const at::Tensor& owned) { owned.mul_(factor).clamp_(-bound, bound); });
    factor = 1;
  }
  update(optimizers, {.scale = factor});
}

void Accumulator::update(const Optimizers& optimizers, const offload::GradientFactors& factors,
                         const std::shared_ptr<LateReport>& report) {
  try {
    for (ShardedOptimizer* optimizer : optimizers) optimizer->step_with(factors, report);
  } catch (...) {
    // Some may have taken the factor in place.
    end();
    throw;
  }
}

void Accumulator::end() {
  micro_step_ = 0;
  accumulation_->end();
}

// Whether the step is the same whatever the gradients are, but for one that is not made.
bool Accumulator::may_be_told_late(const Optimizers& optimizers) const {
  const accumulate::LossScalerOptions& scaler = scaler_.options();
  const bool scales = scaler.growth_factor != 1 || scaler.backoff_factor != 1 ||
                      scaler.at_minimum != accumulate::AtMinimum::kContinue;
  if (options_.clip_norm || options_.clip_value || spikes_ || scales) return false;
  return sharded_.sums->can_start() &&
         std::all_of(optimizers.begin(), optimizers.end(), [](const ShardedOptimizer* optimizer) {
           return optimizer->reads_found_inf();
         });
}

// The device itself leaves out the update where a gradient is not finite. The weights of the ranks are
// known to hosts, so their sum does not wait for it.
EnqueuedStep Accumulator::step_told_late(const Optimizers& optimizers) {
  const comm::World& world = sharded_.pages->world();
  StepReport report;
  report.weight = (world.size() > 1 ? sum_over_ranks(world, weight_) : weight_).value();
  report.loss_scale = report.next_loss_scale = scaler_.scale();
  if (report.weight == 0) {
    report.skipped = Skipped::kNoWeight;
    sharded_.writes->skip_update();
    end();
    return EnqueuedStep(std::make_shared<LateReport>(report));
  }
  const GradientSummer::Started sums = sharded_.sums->start(one_group(), 1);
  const double factor = mean_factor(report.weight);
  untold_ = std::make_shared<LateReport>([names = names_, arrived = sums.arrived, factor,
                                          report]() mutable {
    const GradientSums all = arrived();
    for (const size_t index : all.not_finite) report.not_finite.push_back((*names)[index]);
    if (!report.not_finite.empty()) report.skipped = Skipped::kNotFinite;
    report.norm = report.clipped_norm = std::sqrt(all.squares_of_group.front().value()) * factor;
    return report;
  });
  update(optimizers, {.scale = factor, .found_inf = sums.found_inf}, untold_);
  end();
  return EnqueuedStep(untold_);
}

// The scaler counts the step before, which it could not yet.
void Accumulator::hear() {
  if (!untold_) return;
  const bool found_inf = untold_->get().skipped == Skipped::kNotFinite;
  untold_.reset();
  scaler_.update(found_inf);
}

EnqueuedStep Accumulator::enqueue_step(const std::vector<torch::optim::Optimizer*>& given) {
  const Optimizers optimizers = checked(given);
  check_complete();
  hear();
  accumulation_->finish();
  if (may_be_told_late(optimizers)) return step_told_late(optimizers);
  StepReport report = measure();
  ZP_CHECK(report.skipped != Skipped::kNotFinite || !steps_in_backward(),
           "accumulator.step(): ", say_not_finite(report.not_finite),
           ", and backward has made the step with it (options.offload.step kInBackward): the "
           "parameters are not finite now. Restart from the last saved state; with kInStep such a "
           "step is skipped");
  std::exception_ptr stop;
  if (report.stepped() && spikes_) {
    try {
      if (spikes_->look(report.norm).skips()) report.skipped = Skipped::kNormSpike;
    } catch (...) {
      report.skipped = Skipped::kNormSpike;
      stop = std::current_exception();
    }
  }
  if (report.stepped()) {
    apply(report, optimizers);
  } else {
    sharded_.writes->skip_update();
  }
  end();
  if (stop) std::rethrow_exception(stop);
  // Last, since it throws where it is told to stop.
  if (report.skipped != Skipped::kNoWeight) {
    const auto verdict = scaler_.update(report.skipped == Skipped::kNotFinite);
    report.next_loss_scale = verdict.scale_after;
    report.at_lowest_scale = verdict.at_minimum && scaler_.options().backoff_factor < 1;
  }
  return EnqueuedStep(std::make_shared<LateReport>(std::move(report)));
}

void Accumulator::abandon() {
  if (micro_step_ > 0) end();
}

void Accumulator::set_micro_steps(int64_t micro_steps) {
  ZP_CHECK(micro_steps > 0, "accumulator.set_micro_steps(): expected 1 or more, got ", micro_steps);
  ZP_CHECK(micro_step_ == 0, "accumulator.set_micro_steps(): ", micro_step_,
           " micro-batches of a step are there already; set it between steps");
  options_.micro_steps = micro_steps;
}

}  // namespace zeropage

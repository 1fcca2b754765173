#include "accumulate/accumulated_step.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "zero/norms/not_finite.h"
#include "zeropage/check.h"
#include "zeropage/event_sink.h"
#include "zeropage/gradient_norm.h"
#include "zeropage/optimizer.h"

namespace zeropage::accumulate {
namespace {

std::shared_ptr<const std::vector<std::string>> names_in(const zero::ParameterPages& pages) {
  std::vector<std::string> names;
  for (const zero::PlacedParameter& placed : pages.parameters()) {
    names.push_back(placed.parameter.name());
  }
  return std::make_shared<const std::vector<std::string>>(std::move(names));
}

}  // namespace

AccumulatedStep::AccumulatedStep(const zero::ShardedModel& sharded,
                                 const AccumulatorOptions& options, MicroSteps& micro_steps,
                                 StepVerdicts& verdicts)
    : sharded_(sharded),
      options_(options),
      micro_steps_(micro_steps),
      verdicts_(verdicts),
      names_(names_in(*sharded.pages)) {
  check_can_step_in_backward();
}

// The step is made before all gradients are known.
void AccumulatedStep::check_can_step_in_backward() const {
  if (!micro_steps_.step_in_backward()) return;
  ZP_CHECK(!options_.clip_norm && !options_.clip_value && !options_.norm_spikes,
           "AccumulatorOptions: clip_norm, clip_value and norm_spikes look at all gradients before "
           "the step, but Options::offload.step is StepWhen::kInBackward; use StepWhen::kInStep");
  ZP_CHECK(!accumulate::changes(verdicts_.scaler().options()),
           "AccumulatorOptions::loss_scaler: a scale that changes skips steps whose gradients "
           "overflow, but Options::offload.step is StepWhen::kInBackward; use "
           "LossScalerOptions::fixed(), or StepWhen::kInStep");
}

AccumulatedStep::Updates AccumulatedStep::checked(
    const std::vector<torch::optim::Optimizer*>& given) const {
  Updates updates;
  for (torch::optim::Optimizer* optimizer : given) {
    auto* const sharded = dynamic_cast<ShardedOptimizer*>(optimizer);
    ZP_CHECK(sharded != nullptr && updates_of(*sharded).updates(*sharded_.pages),
             "accumulator.step(): expected a zeropage::Optimizer of the accumulator's model, got ",
             sharded == nullptr ? "another class" : "one of another model",
             ", which would step with sums instead of the mean; make it of this model");
    updates.push_back(&updates_of(*sharded));
  }
  return updates;
}

// All parameters.
std::vector<int> AccumulatedStep::one_group() const {
  return std::vector<int>(sharded_.pages->parameters().size(), 0);
}

double AccumulatedStep::mean_factor(double weight) const {
  return micro_steps_.mean_factor(weight, verdicts_.scaler().scale());
}

// Norms of the mean gradient; skips what no step can be made of.
StepReport AccumulatedStep::measure() {
  StepReport report;
  const zero::NormSums sums = sharded_.sums->sum(one_group(), 1, micro_steps_.weight());
  report.weight = sums.weight.value();
  report.loss_scale = report.next_loss_scale = verdicts_.scaler().scale();
  if (micro_steps_.overflow()) {
    report.not_finite = micro_steps_.overflow()->not_finite;
    report.norm = report.clipped_norm = micro_steps_.overflow()->norm;
    report.skipped = Skipped::kNotFinite;
    return report;
  }
  if (!sums.all_finite) {
    report.not_finite = zero::names_over_stages(*sharded_.pages, sums.not_finite);
    report.skipped = Skipped::kNotFinite;
  } else if (report.weight == 0) {
    report.skipped = Skipped::kNoWeight;
    return report;
  }
  report.norm = report.clipped_norm =
      std::sqrt(sums.squares_of_group.front().value()) * mean_factor(report.weight);
  return report;
}

void AccumulatedStep::apply(StepReport& report, const Updates& updates) {
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
  update(updates, {.scale = factor});
}

void AccumulatedStep::update(const Updates& updates, const optim::GradientFactors& factors,
                             const std::shared_ptr<zero::LateReport>& report) {
  try {
    for (zero::ShardedUpdates* of_optimizer : updates) of_optimizer->step_with(factors, report);
  } catch (...) {
    // Some may have taken the factor in place.
    micro_steps_.end();
    throw;
  }
}

// Whether the step is the same whatever the gradients are, but for one that is not made.
bool AccumulatedStep::may_report_late(const Updates& updates) const {
  if (options_.clip_norm || options_.clip_value || !verdicts_.ignore_gradients()) return false;
  return sharded_.sums->can_start() &&
         std::all_of(updates.begin(), updates.end(), [](const zero::ShardedUpdates* of_optimizer) {
           return of_optimizer->reads_found_inf();
         });
}

// The device itself leaves out the update where a gradient is not finite. The weights of the ranks are
// known to hosts, so their sum does not wait for it.
EnqueuedStep AccumulatedStep::enqueue_with_late_report(const Updates& updates) {
  StepReport report;
  report.weight = sharded_.sums->sum_weight(micro_steps_.weight()).value();
  report.loss_scale = report.next_loss_scale = verdicts_.scaler().scale();
  if (report.weight == 0) {
    report.skipped = Skipped::kNoWeight;
    sharded_.writes->skip_update();
    micro_steps_.end();
    return EnqueuedStep(std::make_shared<zero::LateReport>(report));
  }
  const zero::NormSummer::Started sums = sharded_.sums->start(one_group(), 1);
  const double factor = mean_factor(report.weight);
  const auto told = std::make_shared<zero::LateReport>([names = names_, arrived = sums.arrived,
                                                        factor, report]() mutable {
    const zero::NormSums all = arrived();
    for (const size_t index : all.not_finite) report.not_finite.push_back((*names)[index]);
    if (!report.not_finite.empty()) report.skipped = Skipped::kNotFinite;
    report.norm = report.clipped_norm = std::sqrt(all.squares_of_group.front().value()) * factor;
    return report;
  });
  verdicts_.count_later(told);
  update(updates, {.scale = factor, .found_inf = sums.found_inf}, told);
  micro_steps_.end();
  return EnqueuedStep(told);
}

EnqueuedStep AccumulatedStep::enqueue(const std::vector<torch::optim::Optimizer*>& given) {
  const memory::SpanScope span(memory::Span::What::kRange, "step");
  const Updates updates = checked(given);
  micro_steps_.check_complete();
  verdicts_.resolve_verdict();
  micro_steps_.finish();
  if (may_report_late(updates)) return enqueue_with_late_report(updates);
  StepReport report = measure();
  ZP_CHECK(report.skipped != Skipped::kNotFinite || !micro_steps_.step_in_backward(),
           "accumulator.step(): ", zero::say_not_finite(report.not_finite),
           ", and backward has made the step with it (options.offload.step is "
           "StepWhen::kInBackward): the parameters are not finite now. Restart from the last saved "
           "state; with StepWhen::kInStep such a step is skipped");
  const std::exception_ptr stop = verdicts_.look_at_norm(report);
  if (report.stepped()) {
    apply(report, updates);
  } else {
    sharded_.writes->skip_update();
  }
  micro_steps_.end();
  if (stop) std::rethrow_exception(stop);
  // Last, since it throws where it is told to stop.
  verdicts_.count(report);
  return EnqueuedStep(std::make_shared<zero::LateReport>(std::move(report)));
}

}  // namespace zeropage::accumulate

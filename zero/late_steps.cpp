// What an accumulator and its optimizers do where a step is enqueued before it is known whether it may
// be made: the device leaves it out, and the host counts it until it hears of that.
#include <algorithm>
#include <cmath>
#include <utility>

#include <c10/util/ScopeExit.h>

#include "zero/accumulator.h"
#include "zero/gradient_norm.h"
#include "zero/update/sharded_optimizer.h"

namespace zeropage {

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
StepReport Accumulator::step_told_late(const Optimizers& optimizers) {
  const comm::World& world = sharded_.pages->world();
  StepReport report;
  report.weight = (world.size() > 1 ? sum_over_ranks(world, weight_) : weight_).value();
  report.loss_scale = report.next_loss_scale = scaler_.scale();
  if (report.weight == 0) {
    report.skipped = Skipped::kNoWeight;
    sharded_.pages->skip_update();
    end();
    return report;
  }
  const GradientSummer::Started sums = sharded_.sums->start(one_group(), 1);
  const double factor = mean_factor(report.weight);
  untold_ = std::make_shared<LateOutcome>([names = names_, arrived = sums.arrived, factor] {
    const GradientSums all = arrived();
    StepOutcome outcome;
    for (const size_t index : all.not_finite) outcome.not_finite.push_back((*names)[index]);
    if (!outcome.not_finite.empty()) outcome.skipped = Skipped::kNotFinite;
    outcome.norm = outcome.clipped_norm = std::sqrt(all.squares_of_group.front().value()) * factor;
    return outcome;
  });
  report.skipped = {untold_, &StepOutcome::skipped};
  report.norm = {untold_, &StepOutcome::norm};
  report.clipped_norm = {untold_, &StepOutcome::clipped_norm};
  report.not_finite = {untold_, &StepOutcome::not_finite};
  update(optimizers, factor,
         [&](ShardedOptimizer& optimizer) { optimizer.step_unless(sums.found_inf, untold_); });
  end();
  return report;
}

// The scaler counts the step before, which it could not yet.
void Accumulator::hear() {
  if (!untold_) return;
  const bool found_inf = untold_->get().skipped == Skipped::kNotFinite;
  untold_.reset();
  scaler_.update(found_inf);
}

bool ShardedOptimizer::reads_found_inf() const {
  return std::all_of(updates_.begin(), updates_.end(), [](const OfPage& of_page) {
    return !of_page.part && of_page.update->reads_found_inf();
  });
}

void ShardedOptimizer::step_unless(const at::Tensor& found_inf,
                                   std::shared_ptr<LateOutcome> outcome) {
  hear();
  found_inf_ = found_inf;
  const auto leave = c10::make_scope_exit([this] { found_inf_.reset(); });
  step();
  untold_ = std::move(outcome);
}

// What the host counted before it knew that the device left the step out.
void ShardedOptimizer::hear() {
  if (!untold_) return;
  const bool made = untold_->get().skipped == Skipped::kNo;
  untold_.reset();
  if (made) return;
  --made_;
  for (const OfPage& of_page : updates_) of_page.update->uncount_step();
}

}  // namespace zeropage

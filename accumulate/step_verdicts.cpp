#include "accumulate/step_verdicts.h"

#include <utility>

namespace zeropage::accumulate {

StepVerdicts::StepVerdicts(const accumulate::LossScalerOptions& scaler,
                           const std::optional<accumulate::NormSpikeOptions>& spikes)
    : scaler_(scaler) {
  if (spikes) spikes_.emplace(*spikes);
}

bool StepVerdicts::ignore_gradients() const {
  const accumulate::LossScalerOptions& options = scaler_.options();
  const bool scales =
      accumulate::changes(options) || options.at_minimum != accumulate::AtMinimum::kContinue;
  return !spikes_ && !scales;
}

std::exception_ptr StepVerdicts::look_at_norm(StepReport& report) {
  if (!report.stepped() || !spikes_) return nullptr;
  try {
    if (spikes_->look(report.norm).skips()) report.skipped = Skipped::kNormSpike;
  } catch (...) {
    report.skipped = Skipped::kNormSpike;
    return std::current_exception();
  }
  return nullptr;
}

void StepVerdicts::count(StepReport& report) {
  if (report.skipped == Skipped::kNoWeight) return;
  const auto verdict = scaler_.update(report.skipped == Skipped::kNotFinite);
  report.next_loss_scale = verdict.scale_after;
  report.at_lowest_scale = verdict.at_minimum && scaler_.options().backoff_factor < 1;
}

void StepVerdicts::resolve_verdict() {
  if (!pending_report_) return;
  const bool found_inf = pending_report_->get().skipped == Skipped::kNotFinite;
  pending_report_.reset();
  scaler_.update(found_inf);
}

}  // namespace zeropage::accumulate

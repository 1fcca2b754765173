// What an accumulator's steps so far say about the next: the scale of its loss, and whether its norm
// sticks out.
//
// Threads: the training thread. Ranks that see the same norms come to the same verdicts.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include "zero/late_report.h"
#include "zeropage/accumulator.h"

namespace zeropage::accumulate {

class StepVerdicts {
 public:
  StepVerdicts(const accumulate::LossScalerOptions& scaler,
               const std::optional<accumulate::NormSpikeOptions>& spikes);

  // The scaler. It has counted all steps except one whose report is still pending.
  accumulate::LossScaler& scaler() { return scaler_; }
  const accumulate::LossScaler& scaler() const { return scaler_; }
  // Null: norms are not judged.
  accumulate::NormSpikes* spikes() { return spikes_ ? &*spikes_ : nullptr; }
  // Whether they are the same whatever the gradients are.
  bool ignore_gradients() const;

  // Skips a step whose norm sticks out. Returns what NormSpikes throws of it.
  std::exception_ptr look_at_norm(StepReport& report);
  // The step counts for the scale. Throws where a scaler is told to stop.
  void count(StepReport& report);
  // The same for a step whose report comes later; it is counted then.
  void count_later(std::shared_ptr<zero::LateReport> report) {
    pending_report_ = std::move(report);
  }
  // Waits for it.
  void resolve_verdict();

 private:
  accumulate::LossScaler scaler_;
  std::optional<accumulate::NormSpikes> spikes_;
  std::shared_ptr<zero::LateReport> pending_report_;
};

}  // namespace zeropage::accumulate

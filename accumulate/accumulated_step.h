// The step that an accumulator makes of its micro-steps.
//
// Lifetime: the micro-steps and verdicts outlive it. Threads: the training thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include "accumulate/micro_steps.h"
#include "accumulate/step_verdicts.h"
#include "optim/stretch.h"
#include "zero/setup/sharded_model.h"
#include "zero/update/sharded_updates.h"
#include "zeropage/accumulator.h"
#include "zeropage/step_report.h"

namespace zeropage::accumulate {

class AccumulatedStep {
 public:
  // Throws where options contradict the model's.
  AccumulatedStep(const zero::ShardedModel& sharded, const AccumulatorOptions& options,
                  MicroSteps& micro_steps, StepVerdicts& verdicts);

  // Accumulator::enqueue_step(). Collective.
  EnqueuedStep enqueue(const std::vector<torch::optim::Optimizer*>& given);

 private:
  using Updates = std::vector<zero::ShardedUpdates*>;

  void check_can_step_in_backward() const;
  Updates checked(const std::vector<torch::optim::Optimizer*>& given) const;
  std::vector<int> one_group() const;
  double mean_factor(double weight) const;
  StepReport measure();
  void apply(StepReport& report, const Updates& updates);
  void update(const Updates& updates, const optim::GradientFactors& factors,
              const std::shared_ptr<zero::LateReport>& report = nullptr);
  bool may_report_late(const Updates& updates) const;
  EnqueuedStep enqueue_with_late_report(const Updates& updates);

  const zero::ShardedModel sharded_;
  const AccumulatorOptions options_;
  MicroSteps& micro_steps_;
  StepVerdicts& verdicts_;
  // Names of the parameters. Reports keep these and must not keep the pages.
  const std::shared_ptr<const std::vector<std::string>> names_;
};

}  // namespace zeropage::accumulate

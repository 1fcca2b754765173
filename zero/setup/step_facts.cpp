#include "zero/setup/step_facts.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>

#include "operators/operator_interceptor.h"
#include "zeropage/recompute.h"

namespace zeropage::zero {
namespace {

// Forwards of regions and scopes that have ended.
int64_t recomputed_forwards() {
  return checkpointing::recompute_statistics().forwards;
}

}  // namespace

StepFacts::Values StepFacts::now() const {
  const bool in_backward = torch::autograd::get_current_node() != nullptr;
  const std::lock_guard lock(mutex_);
  Values values = values_;
  values.in_backward = in_backward;
  if (values.phase == Phase::kForward) {
    // A scope of operators or a region that still runs looks at them.
    values.recomputes |= operators::OperatorInterceptor::current() != nullptr ||
                         recomputed_forwards() > recomputed_forwards_;
  }
  return values;
}

void StepFacts::begin_forward(int64_t samples, int64_t besides_bytes) {
  const int64_t forwards = recomputed_forwards();
  const bool recomputes = operators::OperatorInterceptor::current() != nullptr;
  const std::lock_guard lock(mutex_);
  recomputed_forwards_ = forwards;
  values_.phase = Phase::kForward;
  values_.trains = c10::GradMode::is_enabled();
  values_.samples = samples;
  values_.besides_bytes = besides_bytes;
  values_.recomputes = recomputes;
}

void StepFacts::end_forward() {
  const int64_t forwards = recomputed_forwards();
  const std::lock_guard lock(mutex_);
  values_.phase = Phase::kLoss;
  values_.recomputes |= forwards > recomputed_forwards_;
}

}  // namespace zeropage::zero

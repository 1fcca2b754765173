#include "zero/gradients/gradient_accumulation.h"

#include <utility>

#include <c10/util/ScopeExit.h>

#include "zeropage/check.h"

namespace zeropage {

GradientAccumulation::GradientAccumulation(std::shared_ptr<GradientReducer> reducer,
                                           std::shared_ptr<StepGradients> gradients,
                                           comm::ReduceOp op)
    : reducer_(std::move(reducer)), gradients_(std::move(gradients)) {
  // Here it is still between two steps; in the backward that follows it would be within one.
  if (reducer_->training().adopted_in() == Unfrozen::kInBackward) reducer_->adopt_unfrozen();
  BackwardPlan plan = reducer_->plan();
  ZP_CHECK(!plan.accumulates(),
           "accumulator.backward(): another accumulator of this model is in the middle of a step; "
           "step() or abandon() it first");
  const std::vector<size_t> left = gradients_->parameters();
  ZP_CHECK(
      left.empty(), "parameter \"", left.empty() ? "" : reducer_->training().name(left.front()),
      "\" has a gradient before the first micro-batch of an accumulation, from a backward() of "
      "your own; call zero_grad() first, and backward() through the accumulator");
  plan.op = op;
  plan.part = StepPart::kNone;
  reducer_->set_plan(plan);
}

GradientAccumulation::~GradientAccumulation() {
  try {
    end();
  } catch (const std::exception&) {
    // Somebody reads the gradients under a guard, and has them.
  }
}

void GradientAccumulation::end() {
  if (std::exchange(has_ended_, true)) return;
  gradients_->mean().end();
  BackwardPlan plan = reducer_->plan();
  plan.op = comm::ReduceOp::kMean;
  plan.part = StepPart::kAll;
  reducer_->set_plan(plan);
  reducer_->drop();
}

void GradientAccumulation::set_part(StepPart part) {
  BackwardPlan plan = reducer_->plan();
  plan.part = part;
  reducer_->set_plan(plan);
}

GradientAccumulation::MicroStep::MicroStep(GradientAccumulation& accumulation, BackwardPlan plan)
    : reducer_(*accumulation.reducer_), between_(reducer_.plan()) {
  TORCH_INTERNAL_ASSERT(between_.part == StepPart::kNone);
  plan.op = between_.op;
  reducer_.set_plan(plan);
}

void GradientAccumulation::offer_mean(OfferedMean::Offer offer) {
  // The last micro-step has no backward where nothing trains that its output was computed of.
  set_part(StepPart::kLastMicroStep);
  {
    const auto between = c10::make_scope_exit([this] { set_part(StepPart::kNone); });
    reducer_->reduce();
  }
  gradients_->mean().offer(std::move(offer));
}

void GradientAccumulation::finish() {
  TORCH_INTERNAL_ASSERT(reducer_->plan().part == StepPart::kNone);
  gradients_->mean().settle();
  set_part(StepPart::kLastMicroStep);
  try {
    gradients_->prepare();
  } catch (...) {
    set_part(StepPart::kNone);
    throw;
  }
  set_part(StepPart::kOver);
}

}  // namespace zeropage

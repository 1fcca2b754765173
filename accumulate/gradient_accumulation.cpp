#include "accumulate/gradient_accumulation.h"

#include <utility>

#include <c10/util/ScopeExit.h>

#include "zeropage/check.h"

namespace zeropage::accumulate {

GradientAccumulation::GradientAccumulation(std::shared_ptr<zero::GradientReducer> reducer,
                                           std::shared_ptr<zero::StepGradients> gradients,
                                           comm::ReduceOp op)
    : reducer_(std::move(reducer)), gradients_(std::move(gradients)) {
  // Here it is still between two steps; in the backward that follows it would be within one.
  if (reducer_->training().adopted_in() == zero::Unfrozen::kInBackward) reducer_->adopt_unfrozen();
  zero::BackwardPlan plan = reducer_->plan();
  ZP_CHECK(!plan.accumulates(),
           "accumulator.backward(): another accumulator of this model is in the middle of a step; "
           "step() or abandon() it first");
  const std::vector<size_t> left = gradients_->parameters();
  ZP_CHECK(
      left.empty(), "parameter \"", left.empty() ? "" : reducer_->training().name(left.front()),
      "\" has a gradient before the first micro-batch of an accumulation, from a backward() of "
      "your own; call zero_grad() first, and backward() through the accumulator");
  plan.op = op;
  plan.part = zero::StepPart::kNone;
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
  sums_.clear();
  let_look();
  gradients_->mean().end();
  zero::BackwardPlan plan = reducer_->plan();
  plan.op = comm::ReduceOp::kMean;
  plan.part = zero::StepPart::kAll;
  reducer_->set_plan(plan);
  reducer_->drop();
}

void GradientAccumulation::set_part(zero::StepPart part) {
  zero::BackwardPlan plan = reducer_->plan();
  plan.part = part;
  reducer_->set_plan(plan);
}

GradientAccumulation::MicroStep::MicroStep(GradientAccumulation& accumulation,
                                           zero::BackwardPlan plan)
    : accumulation_(accumulation), reducer_(*accumulation.reducer_), between_(reducer_.plan()) {
  TORCH_INTERNAL_ASSERT(between_.part == zero::StepPart::kNone);
  accumulation_.is_in_micro_step_ = true;
  accumulation_.sums_.clear();
  accumulation_.let_look();
  plan.op = between_.op;
  // Its reduction completes the sums, also where its backward comes by no parameter that trains.
  if (plan.part == zero::StepPart::kLastMicroStep) reducer_.begin_cycle();
  reducer_.set_plan(plan);
}

void GradientAccumulation::MicroStep::has_ended() {
  accumulation_.is_in_micro_step_ = false;
  if (reducer_.plan().part != zero::StepPart::kMicroStep) return;
  accumulation_.remember_sums();
  if (++accumulation_.micro_steps_ > 1 && reducer_.adds_as_tree()) accumulation_.refuse_looks();
}

void GradientAccumulation::check_last_has_ended(const char* who) const {
  ZP_CHECK(!is_in_micro_step_, who,
           ": the micro-batch before ended by an exception, and a part of its gradients may be in "
           "the sum of the step; call accumulator.abandon() on all ranks, and run the step's "
           "micro-batches again");
}

// What came before waits for its place in the tree, and p.grad() is what came last.
void GradientAccumulation::refuse_looks() {
  refuses_looks_ = true;
  reducer_->buckets().reduced().set_before_use(
      [](const c10::OperatorName& operation, bool /*reads*/) {
        ZP_CHECK(false, operation,
                 ": p.grad() between the micro-batches of a step is of the last one alone where "
                 "sums are the same for every split (options.world_invariant): expected nobody to "
                 "read or change it; do so behind the last backward() of the step, or leave "
                 "world_invariant out");
      });
}

void GradientAccumulation::let_look() {
  if (std::exchange(refuses_looks_, false)) reducer_->buckets().reduced().set_before_use({});
}

void GradientAccumulation::remember_sums() {
  for (const size_t index : reducer_->training().all()) {
    const at::Tensor& gradient = reducer_->training().gradient(index);
    if (gradient.defined()) sums_.emplace_back(index, gradient.getIntrusivePtr());
  }
}

// Dropped or replaced, while the weights of the micro-batches before still count. In place a script may do to the sum
// what it likes.
void GradientAccumulation::check_goes_on() const {
  check_last_has_ended("accumulator.backward()");
  for (const auto& [index, sum] : sums_) {
    const at::Tensor& gradient = reducer_->training().gradient(index);
    ZP_CHECK(
        gradient.defined() && !sum.expired() && sum.lock().get() == gradient.unsafeGetTensorImpl(),
        "parameter \"", reducer_->training().name(index),
        "\": its gradient was zeroed or replaced between two micro-batches of a step, whose "
        "sum it is part of; the accumulator zeroes gradients in step(), leave zero_grad() "
        "out");
  }
}

void GradientAccumulation::offer_mean(zero::OfferedMean::Offer offer) {
  // The last micro-step has no backward where nothing trains that its output was computed of.
  set_part(zero::StepPart::kLastMicroStep);
  {
    const auto between = c10::make_scope_exit([this] { set_part(zero::StepPart::kNone); });
    reducer_->reduce();
    // Whoever changes p.grad() from here on changes the whole sum.
    take_over_writes(*reducer_);
  }
  gradients_->mean().offer(std::move(offer));
}

void GradientAccumulation::finish() {
  TORCH_INTERNAL_ASSERT(reducer_->plan().part == zero::StepPart::kNone);
  check_last_has_ended("accumulator.step()");
  gradients_->mean().settle();
  set_part(zero::StepPart::kLastMicroStep);
  try {
    gradients_->prepare();
  } catch (...) {
    set_part(zero::StepPart::kNone);
    throw;
  }
  set_part(zero::StepPart::kOver);
}

}  // namespace zeropage::accumulate

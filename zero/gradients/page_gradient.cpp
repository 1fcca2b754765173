#include "zero/gradients/page_gradient.h"

#include <algorithm>

#include <c10/util/Exception.h>

#include "parallel/slice_mark.h"
#include "zeropage/check.h"

namespace zeropage::zero {

std::string_view name(GradientState state) {
  switch (state) {
    case GradientState::kCollecting:
      return "collecting";
    case GradientState::kReopened:
      return "reopened";
    case GradientState::kReducing:
      return "reducing";
    case GradientState::kReduced:
      return "reduced";
    case GradientState::kSummed:
      return "summed";
  }
  return "?";
}

void GradientStateMachine::move_to(GradientState next) {
  const bool is_allowed =
      std::any_of(kGradientMoves.begin(), kGradientMoves.end(),
                  [&](const GradientMove& move) { return move.from == now_ && move.to == next; });
  TORCH_INTERNAL_ASSERT(is_allowed, "a page's gradient cannot go from ", name(now_), " to ",
                        name(next));
  now_ = next;
}

PageGradient::PageGradient(size_t page, const TrainingParameters& training,
                           GradientBuckets& buckets)
    : page_(page), training_(training), buckets_(buckets), slots_(page, training, buckets) {}

void PageGradient::reopen(const GradientPresence& present) {
  TORCH_INTERNAL_ASSERT(is_reduced());
  std::vector<Range> forgotten;
  for (Slot& slot : slots_.all()) {
    // Another tensor than the reduced gradient is one that the user set since: this rank's own, to
    // be averaged.
    slot.is_kept = buckets_.reduced().is(slot.parameter, training_.gradient(slot.parameter));
    if (slot.is_kept) continue;
    ZP_CHECK(
        !is(State::kSummed) || !present.has(slot.parameter), "parameter \"",
        training_.name(slot.parameter),
        "\": its gradient was zeroed or replaced between two micro-batches of a step, whose "
        "sum it is part of; the accumulator zeroes gradients in step(), leave zero_grad() out");
    forgotten.push_back(training_.placed(slot.parameter).range);
  }
  if (forgotten.size() < slots_.all().size()) {
    buckets_.keep(page_, forgotten);
    slots_.reopen();
    // Not before: they keep the memory of what is kept.
    for (const Slot& slot : slots_.all()) {
      if (slot.is_kept) training_.gradient(slot.parameter).reset();
    }
  } else if (is(State::kSummed)) {
    buckets_.skip(page_);
  } else {
    buckets_.forget(page_);
  }
  state_.move_to(State::kReopened);
}

void PageGradient::forget(Slot& slot) {
  slot.is_kept = false;
  slot.seen_version = Slot::kUnseen;
  buckets_.forget(page_, training_.placed(slot.parameter).range);
}

// What the user did to p.grad() since it stands for what is kept.
void PageGradient::check_user_changes(Slot& slot) {
  if (!slot.is_kept || slot.seen_version == Slot::kUnseen) return;
  const at::Tensor& gradient = training_.gradient(slot.parameter);
  const bool is_ours = gradient.defined() && same_elements(gradient, slot.view);
  if (is_ours && gradient._version() == slot.seen_version) return;
  const parallel::SlicesAsTheyAre scope;
  ZP_CHECK(
      !is_ours || !gradient.any().item<bool>(), "parameter \"", training_.name(slot.parameter),
      "\": p.grad() was changed in place after a backward under no_sync(), but a mean from a "
      "backward before that belongs to it, which is kept in shards and was not changed; change "
      "gradients before no_sync(), or after a backward that averages");
  forget(slot);
}

void PageGradient::before_accumulate(size_t parameter, const GradientPresence& present) {
  if (is_reduced()) {
    reopen(present);
  } else {
    slots_.reopen_if_used();
    Slot& slot = slots_.of(parameter);
    check_user_changes(slot);
    slot.seen_version = Slot::kUnseen;
  }
}

bool PageGradient::hides_kept() const {
  return is(State::kReopened) && std::any_of(slots_.all().begin(), slots_.all().end(),
                                             [](const Slot& slot) { return slot.is_kept; });
}

void PageGradient::end_without_reduction() {
  arrived_ = 0;
  if (!is_collecting()) return;
  slots_.reopen_if_used();
  std::vector<size_t> hidden;
  for (Slot& slot : slots_.all()) {
    at::Tensor& gradient = training_.gradient(slot.parameter);
    check_user_changes(slot);
    if (!slot.is_kept) continue;
    if (!gradient.defined()) {
      hidden.push_back(slot.parameter);
      gradient = slot.view;
    }
    slot.seen_version = slot.view._version();
  }
  slots_.zero(hidden);
  state_.move_to(State::kCollecting);
  slots_.let_go();
}

// What it set aside to be kept is gone with what it collected: its gradients have been zeroed since.
void PageGradient::abandon() {
  arrived_ = 0;
  if (!is_collecting()) return;
  for (Slot& slot : slots_.all()) {
    if (slot.is_kept && !training_.gradient(slot.parameter).defined()) forget(slot);
  }
  state_.move_to(State::kCollecting);
  slots_.let_go();
}

void PageGradient::start(comm::ReduceOp op, GradientPresence& present) {
  TORCH_INTERNAL_ASSERT(is_collecting() && slots_.are_open());
  std::vector<size_t> missing;
  for (Slot& slot : slots_.all()) {
    check_user_changes(slot);
    const bool has = training_.gradient(slot.parameter).defined();
    if (!has) missing.push_back(slot.parameter);
    present.note(slot.parameter, has || slot.is_kept);
  }
  slots_.zero(missing);
  state_.move_to(State::kReducing);
  reduction_ = buckets_.start_reduction(page_, op);
  if (buckets_.are_transient()) slots_.close();
}

void PageGradient::wait() {
  TORCH_INTERNAL_ASSERT(is_reducing());
  reduction_.wait();
  reduction_ = {};
}

void PageGradient::close(const BackwardPlan& plan) {
  arrived_ = 0;
  for (Slot& slot : slots_.all()) {
    slot.is_kept = false;
    slot.seen_version = Slot::kUnseen;
  }
  state_.move_to(plan.accumulates() ? State::kSummed : State::kReduced);
  buckets_.close(page_, plan.backwards());
}

void PageGradient::hand_over(const GradientPresence& present) {
  ReducedGradients& reduced = buckets_.reduced();
  for (const Slot& slot : slots_.all()) {
    at::Tensor& gradient = training_.gradient(slot.parameter);
    if (!present.has(slot.parameter)) {
      gradient.reset();
    } else if (!reduced.is(slot.parameter, gradient)) {
      gradient = reduced.of(slot.parameter);
    }
  }
  slots_.let_go();
}

void PageGradient::drop() {
  // In the middle of a sum.
  if (is_collecting() || is(State::kSummed)) buckets_.forget(page_);
  state_.move_to(is_reduced() ? State::kReduced : State::kCollecting);
  for (Slot& slot : slots_.all()) {
    training_.gradient(slot.parameter).reset();
    slot.is_kept = false;
    slot.seen_version = Slot::kUnseen;
  }
  slots_.let_go();
}

}  // namespace zeropage::zero

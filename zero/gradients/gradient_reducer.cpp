#include "zero/gradients/gradient_reducer.h"

#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "zeropage/check.h"

namespace zeropage::zero {
namespace {

// Where this rank's loss has a weight of 0 it brings zeros, or no finite numbers. All else is of the losses of other ranks, whose
// tokens this rank's experts or attention have computed with. It may wait for the device.
std::vector<at::Tensor> of_other_losses(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> of_others(gradients.size());
  for (size_t index = 0; index < gradients.size(); ++index) {
    const at::Tensor& gradient = gradients[index];
    if (!gradient.defined() || gradient.is_meta() || gradient.layout() != at::kStrided) continue;
    if (!at::isFloatingType(gradient.scalar_type())) continue;
    const at::Tensor finite = at::nan_to_num(gradient, 0, 0, 0);
    if (finite.ne(0).any().item<bool>()) of_others[index] = finite;
  }
  return of_others;
}

}  // namespace

GradientReducer::GradientReducer(const PageParts& parts, std::unique_ptr<GradientBuckets> buckets,
                                 std::shared_ptr<RankAgreement> agreement, Unfrozen unfrozen)
    : pages_(parts.pages),
      paging_(parts.paging),
      writes_(parts.writes),
      buckets_(std::move(buckets)),
      agreement_(std::move(agreement)),
      ledger_(memory::Ledger::current()),
      training_(parts.pages,
                {.before =
                     [this](size_t parameter, const auto& gradients) {
                       return before_accumulate(parameter, gradients);
                     },
                 .after = [this](size_t parameter) { after_accumulate(parameter); }},
                unfrozen),
      reductions_(parts.pages, training_, *buckets_, agreement_) {
  adopt_training();
}

void GradientReducer::set_collect(Collect collect) {
  BackwardPlan changed = plan();
  changed.collect = collect;
  set_plan(changed);
}

void GradientReducer::begin_no_sync() {
  if (no_syncs_++ == 0) set_collect(Collect::kLocally);
}

void GradientReducer::end_no_sync() {
  if (--no_syncs_ == 0) set_collect(Collect::kForReduction);
}

void GradientReducer::set_beside_gradients(BesideGradients beside) {
  beside_ = std::move(beside);
  reductions_.make_room_beside(beside_.count);
}

void GradientReducer::adopt_training() {
  for (const size_t page : training_.adopt()) reductions_.begin_training(page);
}

void GradientReducer::adopt_unfrozen() {
  const std::vector<size_t> parameters = training_.unfrozen();
  if (parameters.empty()) return;
  std::vector<std::string> lines;
  for (const size_t index : parameters) lines.push_back("unfrozen: " + training_.name(index));
  pages_->world().check_agreement("which parameters were unfrozen", lines);
  const std::string& name = training_.name(parameters.front());
  ZP_CHECK(!plan().accumulates(), "parameter \"", name,
           "\" was unfrozen between the micro-batches of a step, whose sums have nothing of it; "
           "unfreeze it after accumulator.step()");
  ZP_CHECK(backward_ == kNoBackward, "parameter \"", name,
           "\" was unfrozen after a backward that did not end; unfreeze it between two steps");
  for (const size_t index : parameters) writes_->begin_training(index);
  adopt_training();
}

// On an accelerator backward runs on a thread of autograd's, which charges no rank.
std::vector<at::Tensor> GradientReducer::before_accumulate(
    size_t parameter, const std::vector<at::Tensor>& gradients) {
  const memory::LedgerScope ledger(ledger_);
  const torch::NoGradGuard no_grad;
  enter_backward();
  // It was unfrozen in the middle of the backward.
  if (!training_.contains(parameter)) return gradients;
  if (reductions_.before_accumulate(parameter)) reduced_in_cycle_ = false;
  return plan().discards ? of_other_losses(gradients) : gradients;
}

void GradientReducer::after_accumulate(size_t parameter) {
  const memory::LedgerScope ledger(ledger_);
  const torch::NoGradGuard no_grad;
  if (!training_.contains(parameter)) return;
  reductions_.after_accumulate(parameter);
  if (reduces_in_backward()) reductions_.start_complete();
}

void GradientReducer::enter_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == backward_) return;
  if (backward_ != kNoBackward) {
    ZP_CHECK(
        !reductions_.have_begun(),
        "an earlier backward ended by an exception, or this one runs inside another, after some "
        "gradients were exchanged: the ranks are out of step; restart from the last saved state");
    reductions_.abandon();
    leave_backward();
  }
  ZP_CHECK(
      plan().part != StepPart::kNone && plan().part != StepPart::kOver,
      "backward() past the accumulator in the middle of a step, whose gradients it would change: "
      "call accumulator.backward(loss), or accumulator.abandon() first");
  if (training_.adopted_in() == Unfrozen::kInBackward) adopt_unfrozen();
  agreement_->begin_backward(reduces_in_backward());
  backward_ = task;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this, reduces = reduces_in_backward()] {
        const memory::LedgerScope ledger(ledger_);  // on autograd's thread too
        if (reduces) {
          end_reducing_backward();
        } else {
          const torch::NoGradGuard no_grad;
          reductions_.end_without_reduction();
          leave_backward();
        }
      });
}

void GradientReducer::leave_backward() {
  paging_->end_backward();
  backward_ = kNoBackward;
}

void GradientReducer::end_reducing_backward() {
  const torch::NoGradGuard no_grad;
  const AgreementHashes own_hashes = agreement_->own_hashes();
  const AgreementResult agreed_on = reductions_.finish(own_hashes, beside_.tell);
  if (beside_.hear) beside_.hear(reductions_.beside());
  leave_backward();
  reduced_in_cycle_ = true;
  agreement_->take_backward_result(own_hashes, agreed_on);
}

void GradientReducer::reduce() {
  ZP_CHECK(
      backward_ == kNoBackward,
      "step() after a backward that ended by an exception: its gradients are incomplete; zero them "
      "and run backward again first");
  if (reduced_in_cycle_) return;
  const torch::NoGradGuard no_grad;
  agreement_->begin_backward(/*reduces=*/true);
  end_reducing_backward();
}

void GradientReducer::drop() {
  reductions_.drop();
  begin_cycle();
}

void settle_unfrozen(GradientReducer& reducer) {
  const TrainingParameters& training = reducer.training();
  if (training.adopted_in() == Unfrozen::kInForward) return training.check_all_train();
  reducer.adopt_unfrozen();
}

void take_over_writes(GradientReducer& reducer) {
  GradientBuckets& buckets = reducer.buckets();
  buckets.reduced().release("step()");
  bool changed = false;
  for (const size_t page : reducer.training().pages()) changed |= buckets.complete(page);
  if (changed) buckets.note_reduced();
}

}  // namespace zeropage::zero

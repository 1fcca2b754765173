#include "zero/gradients/backward.h"

#include <algorithm>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "device/named_range.h"
#include "device/stream.h"
#include "zeropage/check.h"
#include "zeropage/event_sink.h"

namespace zeropage::zero {
namespace {

std::vector<PageGradient> gradients_of_pages(size_t pages, const TrainingParameters& training,
                                             GradientBuckets& buckets) {
  std::vector<PageGradient> gradients;
  for (size_t page = 0; page < pages; ++page) gradients.emplace_back(page, training, buckets);
  return gradients;
}

void tell_of(memory::PageChange change, const PageLayout& layout) {
  if (const auto sink = memory::current_sink()) {
    sink->on_page({.change = change, .pages = "gradient", .page = layout.name, .bytes = 0});
  }
}

}  // namespace

PageReductions::PageReductions(std::shared_ptr<ParameterPages> pages,
                               const TrainingParameters& training, GradientBuckets& buckets,
                               std::shared_ptr<RankAgreement> agreement)
    : pages_(std::move(pages)),
      training_(training),
      buckets_(buckets),
      agreement_(std::move(agreement)),
      present_(pages_->parameters().size(), pages_->layouts().size()),
      gradients_(gradients_of_pages(pages_->layouts().size(), training, buckets)),
      waiting_(gradients_.size()) {}

void PageReductions::begin_training(size_t page) {
  GradientSlots& slots = gradients_[page].slots();
  slots.begin_training();
  // What they had before they were hooked is this rank's own, as after no_sync().
  if (gradients_[page].is_collecting()) collect_page(page);
  slots.let_go();
}

bool PageReductions::before_accumulate(size_t parameter) {
  PageGradient& gradient = gradients_[training_.placed(parameter).page];
  const bool was_reduced = gradient.is_reduced();
  gradient.before_accumulate(parameter, present_);
  return was_reduced;
}

void PageReductions::after_accumulate(size_t parameter) {
  const size_t page = training_.placed(parameter).page;
  PageGradient& gradient = gradients_[page];
  TORCH_INTERNAL_ASSERT(gradient.is_collecting(), "parameter \"", training_.name(parameter),
                        "\" got a gradient while its bucket was reduced");
  const bool is_last = gradient.arrive();
  if (!gradient.slots().outside({parameter}).empty()) {
    waiting_.add(page, parameter, training_.gradient(parameter).numel());
  }
  if (!is_last && may_wait(page)) return;
  collect_waiting(page);
  // Other pages' too, if their buckets have memory: what waits longer would leave less room.
  for (const size_t other : waiting_.pages()) {
    if (gradients_[other].slots().are_open()) collect_waiting(other);
  }
}

// Half a page over all pages: a model of which every page misses a gradient holds no more.
bool PageReductions::may_wait(size_t page) const {
  const bool has_launches = device::has_streams(pages_->world().communicator().device().type());
  if (!has_launches && !would_block(page)) return false;
  return 2 * waiting_.numel() <= pages_->layouts()[page].numel;
}

bool PageReductions::would_block(size_t page) const {
  if (!buckets_.are_transient() || gradients_[page].slots().are_open()) return false;
  // Where closing a bucket calls the ranks of other groups, it comes at the same point on all: ranks that wait for
  // each other in the operations of two communicators in another order would wait for ever.
  const bool is_collective = pages_->worlds().replicas.has_value();
  return std::any_of(reducing_.begin(), reducing_.end(),
                     [&](size_t other) { return is_collective || !gradients_[other].has_ended(); });
}

void PageReductions::collect(size_t page, std::vector<size_t> parameters) {
  waiting_.forget(page);
  GradientSlots& slots = gradients_[page].slots();
  slots.reopen_if_used();
  parameters = slots.outside(std::move(parameters));
  if (parameters.empty()) return;
  open(page);
  slots.collect(parameters);
}

// The reduction of the page before has had all of this page's backward so far to end in.
void PageReductions::open(size_t page) {
  if (gradients_[page].slots().are_open()) return;
  if (buckets_.are_transient()) end_all();
  gradients_[page].slots().open(plan_.collect);
}

void PageReductions::start_complete() {
  while (next_ < training_.pages().size()) {
    const size_t page = training_.pages()[next_];
    if (!gradients_[page].is_complete()) return;
    start(page);
    ++next_;
  }
}

void PageReductions::start_rest() {
  for (; next_ < training_.pages().size(); ++next_) {
    const size_t page = training_.pages()[next_];
    if (gradients_[page].is_reduced()) gradients_[page].reopen(present_);
    start(page);
  }
}

void PageReductions::start(size_t page) {
  const device::NamedRange range("PageReductions::start");
  const PageLayout& layout = pages_->layouts()[page];
  const memory::OwnerScope owner("reduction", layout.name);
  collect_page(page);
  open(page);
  gradients_[page].start(plan_.op, present_);
  reducing_.push_back(page);
  tell_of(memory::PageChange::kReducing, layout);
  if (!on_reduced_) return;
  // The same for all pages, and as long to write down as there are parameter groups.
  if (next_ == 0) hashes_ = agreement_->own_hashes();
  present_.start_agreeing(page, training_.of_page(page), hashes_, pages_->world().communicator());
  // One page behind: the reductions of whole gradients are else looked at when backward ends.
  while (reducing_.front() != page) end_first();
}

void PageReductions::end_first() {
  const size_t page = reducing_.front();
  const device::NamedRange range("PageReductions::end");
  const PageLayout& layout = pages_->layouts()[page];
  const memory::OwnerScope owner("reduction", layout.name);
  gradients_[page].wait();
  tell_of(memory::PageChange::kReduced, layout);
  reducing_.pop_front();
  gradients_[page].close(plan_);
  if (!on_reduced_) return;
  const auto [has_gradient, agreed_on] = present_.wait(page);
  if (plan_.backwards() == Backwards::kMoreFollow) return;
  // The step is made now.
  if (!agreed_on.all()) agreement_->settle(pages_->world(), "backward()");
  buckets_.wait_closed(page);
  buckets_.complete(page);
  on_reduced_(page, has_gradient, plan_.factor);
}

void PageReductions::end_all() {
  while (!reducing_.empty()) end_first();
}

AgreementResult PageReductions::finish(const AgreementHashes& own_hashes) {
  const comm::Pending agreement =
      present_.start_agreeing(own_hashes, pages_->world().communicator());
  end_all();
  {
    const memory::OwnerScope owner("which parameters have gradients");
    agreement.wait();
  }
  for (const size_t page : training_.pages()) gradients_[page].hand_over(present_);
  buckets_.note_reduced();
  next_ = 0;
  return present_.agreed_on();
}

void PageReductions::end_without_reduction() {
  for (const size_t page : training_.pages()) {
    collect_waiting(page);
    if (gradients_[page].hides_kept()) open(page);
    gradients_[page].end_without_reduction();
  }
}

void PageReductions::abandon() {
  for (const size_t page : training_.pages()) {
    waiting_.forget(page);
    gradients_[page].abandon();
  }
}

void PageReductions::release_zeroed() {
  for (const size_t page : training_.pages()) {
    const std::vector<size_t>& parameters = training_.of_page(page);
    const bool any = std::any_of(parameters.begin(), parameters.end(), [this](size_t parameter) {
      return training_.gradient(parameter).defined();
    });
    if (!any) buckets_.reduced().release_zeroed(page);
  }
}

void PageReductions::drop() {
  // Alone nothing was exchanged, so a backward that did not end leaves no rank out of step.
  if (pages_->world().size() == 1 && !on_reduced_) {
    end_all();
    next_ = 0;
  }
  // Before any is dropped: it throws where somebody reads one.
  buckets_.reduced().release("dropping the gradients of a step");
  for (const size_t page : training_.pages()) gradients_[page].drop();
  // What a step that threw has left under way.
  reducing_.clear();
}

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
  return plan().discards ? std::vector<at::Tensor>(gradients.size()) : gradients;
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
  paging_->check_not_parked("backward()");
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
  agreement_->begin_backward(averages());
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

RankAgreement::Averages GradientReducer::averages() const {
  using Averages = RankAgreement::Averages;
  if (!reduces_in_backward()) return Averages::kNothing;
  return plan().backwards() == Backwards::kMoreFollow ? Averages::kPartOfStep : Averages::kStep;
}

void GradientReducer::leave_backward() {
  paging_->end_backward();
  backward_ = kNoBackward;
}

void GradientReducer::end_reducing_backward() {
  const torch::NoGradGuard no_grad;
  const AgreementHashes own_hashes = agreement_->own_hashes();
  reductions_.start_rest();
  if (beside_.tell) beside_.tell(reductions_.beside());
  const AgreementResult agreed_on = reductions_.finish(own_hashes);
  if (beside_.hear) beside_.hear(reductions_.beside());
  leave_backward();
  reduced_in_cycle_ = true;
  agreement_->take_backward_result(own_hashes, agreed_on);
}

std::string GradientReducer::what_is_pending() const {
  if (backward_ != kNoBackward) return "a backward has not ended, or ended by an exception";
  if (no_syncs_ > 0) return "a no_sync() guard is alive";
  if (plan().accumulates()) return "it is in the middle of an accumulation";
  for (size_t index = 0; index < training_.size(); ++index) {
    if (!training_.gradient(index).defined()) continue;
    return "parameter \"" + training_.name(index) + "\" has a gradient";
  }
  return "";
}

void GradientReducer::reduce() {
  paging_->check_not_parked("what reads gradients");
  ZP_CHECK(
      backward_ == kNoBackward,
      "step() after a backward that ended by an exception: its gradients are incomplete; zero them "
      "and run backward again first");
  if (reduced_in_cycle_) return;
  const torch::NoGradGuard no_grad;
  agreement_->begin_backward(RankAgreement::Averages::kStep);
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

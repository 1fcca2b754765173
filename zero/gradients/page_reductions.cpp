#include "zero/gradients/page_reductions.h"

#include <algorithm>
#include <utility>

#include "device/named_range.h"
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
      collector_(*pages_, training, buckets, gradients_, reducing_, [this] { end_all(); }) {}

void PageReductions::begin_training(size_t page) {
  GradientSlots& slots = gradients_[page].slots();
  slots.begin_training();
  // What they had before they were hooked is this rank's own, as after no_sync().
  if (gradients_[page].is_collecting()) collector_.collect_page(page, plan_.collect);
  slots.let_go();
}

bool PageReductions::before_accumulate(size_t parameter) {
  PageGradient& gradient = gradients_[training_.placed(parameter).page];
  const bool was_reduced = gradient.is_reduced();
  gradient.before_accumulate(parameter, present_);
  return was_reduced;
}

void PageReductions::after_accumulate(size_t parameter) {
  PageGradient& gradient = gradients_[training_.placed(parameter).page];
  TORCH_INTERNAL_ASSERT(gradient.is_collecting(), "parameter \"", training_.name(parameter),
                        "\" got a gradient while its bucket was reduced");
  collector_.add(parameter, gradient.arrive(), plan_.collect);
}

void PageReductions::start_complete() {
  while (next_ < training_.pages().size()) {
    const size_t page = training_.pages()[next_];
    if (!gradients_[page].is_complete()) return;
    start(page);
    ++next_;
  }
}

void PageReductions::start(size_t page) {
  const device::NamedRange range("PageReductions::start");
  const PageLayout& layout = pages_->layouts()[page];
  const memory::OwnerScope owner("reduction", layout.name);
  collector_.collect_page(page, plan_.collect);
  collector_.open(page, plan_.collect);
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

AgreementResult PageReductions::finish(const AgreementHashes& own_hashes,
                                       const std::function<void(uint8_t* bytes)>& tell) {
  for (; next_ < training_.pages().size(); ++next_) {
    const size_t page = training_.pages()[next_];
    if (gradients_[page].is_reduced()) gradients_[page].reopen(present_);
    start(page);
  }
  if (tell) tell(present_.beside());
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
    collector_.collect_waiting(page, plan_.collect);
    if (gradients_[page].hides_kept()) collector_.open(page, plan_.collect);
    gradients_[page].end_without_reduction();
  }
}

void PageReductions::abandon() {
  for (const size_t page : training_.pages()) {
    collector_.forget(page);
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

}  // namespace zeropage::zero

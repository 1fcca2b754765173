#include "zero/update/page_updates.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <c10/util/ScopeExit.h>

#include "zero/update/fused_update.h"
#include "zeropage/check.h"

namespace zeropage::zero {
namespace {

std::unique_ptr<OffloadedSteps> make_steps(const std::shared_ptr<PageOffload>& page_offload,
                                           const UpdateAlgorithm& algorithm) {
  if (!page_offload) return nullptr;
  ZP_CHECK(static_cast<bool>(algorithm.make_fused),
           "options.offload.optimizer: ", algorithm.class_name, " has no fused form, ",
           names_with_fused_form(), " have; keep its state on the device");
  const bool late = page_offload->options().step == StepWhen::kOneStepLate;
  return std::make_unique<OffloadedSteps>(
      page_offload, late ? OffloadedSteps::Publish::kWhenTold : OffloadedSteps::Publish::kAtOnce);
}

}  // namespace

PageUpdates::PageUpdates(ShardedModel parameters, const UpdateFactory& factory,
                         ParameterGroups& groups)
    : parameters_(std::move(parameters)),
      factory_(factory),
      groups_(groups),
      steps_(make_steps(parameters_.pages->page_offload(), factory_.algorithm())),
      holder_(parameters_.holders->add(
          {.visit = [this](const VisitMemory& visit) { visit_memory(visit); },
           .settle = [this] { return settle(); }})) {
  const ParameterPages& pages = *parameters_.pages;
  for (size_t page = 0; page < pages.layouts().size(); ++page) {
    if (!pages.layouts()[page].requires_grad) continue;
    updates_.push_back(make(page));
  }
  known_training_ = pages.training_version();
  adopt_groups();
}

PageUpdates::OfPage PageUpdates::make(size_t page) const {
  if (parameters_.pages->offloads_optimizer(page)) return make_offloaded(page);
  return {page, factory_.make(page), std::nullopt};
}

PageUpdates::OfPage PageUpdates::make_offloaded(size_t page) const {
  const ParameterPages& pages = *parameters_.pages;
  PageOffload& page_offload = *pages.page_offload();
  OwnedPart part = factory_.owned_part(page);
  OffloadedSteps::Part moved{
      .page = page, .name = pages.layouts()[page].name, .values = part.values};
  if (parameters_.masters->copy(page).defined()) {
    moved.values = parameters_.masters->copy(page);
    (pages.offloads_parameters(page) ? part.copy_out : moved.to) = part.values;
    part.adopts_copy = pages.offloads_parameters(page);
  }
  moved.gradient = parameters_.gradients->is_offloaded(page)
                       ? parameters_.gradients->owned(page)
                       : page_offload.gradients().add(page, pages.owned(page).numel(),
                                                      pages.plan()[page].gradient_dtype, 0,
                                                      memory::Kind::kGradient);
  part.values = moved.values;
  part.states = &page_offload.states();
  part.page = page;
  const size_t index = steps_->add(std::move(moved));
  if (!part.copy_out.defined()) part.copy_out = steps_->copy_out(index);
  return {page, factory_.make_fused(std::move(part)), index};
}

const PageUpdates::OfPage* PageUpdates::find(size_t page) const {
  const auto at =
      std::lower_bound(updates_.begin(), updates_.end(), page,
                       [](const OfPage& of, size_t wanted) { return of.page < wanted; });
  return at != updates_.end() && at->page == page ? &*at : nullptr;
}

const PageUpdates::OfPage* PageUpdates::offloaded(size_t page) const {
  const OfPage* const of_page = find(page);
  return of_page != nullptr && of_page->part ? of_page : nullptr;
}

void PageUpdates::adopt(int64_t steps) {
  adopt_pages(steps);
  adopt_groups();
}

void PageUpdates::adopt_pages(int64_t steps) {
  const ParameterPages& pages = *parameters_.pages;
  if (known_training_ == pages.training_version()) return;
  known_training_ = pages.training_version();
  std::vector<OfPage> made;
  for (size_t page = 0; page < pages.layouts().size(); ++page) {
    if (!pages.layouts()[page].requires_grad || find(page) != nullptr) continue;
    made.push_back(make(page));
    add_groups(made.back(), /*first=*/0);
    made.back().update->set_updates(steps);
    take_frozen_states(made.back());
  }
  std::move(made.begin(), made.end(), std::back_inserter(updates_));
  std::sort(updates_.begin(), updates_.end(),
            [](const OfPage& left, const OfPage& right) { return left.page < right.page; });
}

void PageUpdates::take_frozen_states(const OfPage& of_page) {
  if (!frozen_states_.has(of_page.page)) return;
  const auto write = [this](size_t page, OwnedState& state) {
    frozen_states_.write_to(page, state);
  };
  visit_states(of_page, StateAccess::kWrite, write, nullptr);
  frozen_states_.forget(of_page.page);
}

void PageUpdates::adopt_groups() {
  if (known_groups_ == groups_.size()) return;
  groups_.adopt(known_groups_);
  for (OfPage& of_page : updates_) add_groups(of_page, known_groups_);
  known_groups_ = groups_.size();
}

// Adds the groups from `first` on, which were adopted.
void PageUpdates::add_groups(OfPage& of_page, size_t first) const {
  std::vector<OwnedGroup> groups = groups_.owned(of_page.page, first);
  if (groups.empty()) return;
  // Its thread may be making the update that is about to change.
  if (of_page.part) steps_->wait(*of_page.part);
  for (const OwnedGroup& group : groups) of_page.groups.push_back(group.number);
  of_page.update->add_groups(std::move(groups));
}

void PageUpdates::set_options(const OfPage& of_page) const {
  for (size_t index = 0; index < of_page.groups.size(); ++index) {
    of_page.update->set_options(index, groups_.options(of_page.groups[index]));
  }
}

bool PageUpdates::read_found_inf() const {
  return std::all_of(updates_.begin(), updates_.end(), [](const OfPage& of_page) {
    return !of_page.part && of_page.update->reads_found_inf();
  });
}

void PageUpdates::uncount_step() const {
  for (const OfPage& of_page : updates_) of_page.update->uncount_step();
}

void PageUpdates::set_updates(int64_t updates) const {
  for (const OfPage& of_page : updates_) of_page.update->set_updates(updates);
}

bool PageUpdates::are_under_way() const {
  return std::any_of(updates_.begin(), updates_.end(), [this](const OfPage& of_page) {
    return of_page.part && steps_->started(*of_page.part);
  });
}

void PageUpdates::visit_memory(const VisitMemory& visit) const {
  for (const OfPage& of_page : updates_) of_page.update->visit_memory(visit);
  frozen_states_.visit_memory(visit);
}

std::string PageUpdates::settle() const {
  if (!are_under_way()) return "";
  if (parameters_.options.offload.step == StepWhen::kInBackward) {
    return "backward() has begun the step (StepWhen::kInBackward)";
  }
  // One step late: its values go to the device in the next step.
  for (const OfPage& of_page : updates_) {
    if (of_page.part) steps_->wait(*of_page.part);
  }
  return "";
}

void PageUpdates::visit_states(const OfPage& of_page, StateAccess access,
                               const std::function<void(size_t page, OwnedState&)>& visit,
                               const std::function<void(size_t page)>& end_page) const {
  const auto use =
      access == StateAccess::kWrite ? TierStorage::Use::kWrite : TierStorage::Use::kRead;
  set_options(of_page);
  const bool is_away = of_page.part && access != StateAccess::kDescribe;
  PageOffload* const away = is_away ? parameters_.pages->page_offload().get() : nullptr;
  if (away != nullptr) away->fetch_for_update(of_page.page);
  const auto release = c10::make_scope_exit([&] {
    if (away != nullptr) away->release_after_update(of_page.page, use);
  });
  of_page.update->visit_states(access, [&](OwnedState& state) { visit(of_page.page, state); });
  if (end_page) end_page(of_page.page);
}

}  // namespace zeropage::zero

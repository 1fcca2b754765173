#include "zero/pages/page_writes.h"

#include <utility>

#include "zero/parameter_scan.h"
#include "zeropage/check.h"

namespace zeropage::zero {

PageWrites::PageWrites(std::shared_ptr<ParameterPages> pages,
                       std::shared_ptr<MasterWeights> masters,
                       std::shared_ptr<const WholePages> paging,
                       std::shared_ptr<const ModulePlacement> in_place,
                       std::shared_ptr<UserWrites> user_writes)
    : pages_(std::move(pages)),
      masters_(std::move(masters)),
      paging_(std::move(paging)),
      in_place_(std::move(in_place)),
      user_writes_(std::move(user_writes)),
      versions_(pages_->parameters().size()) {}

void PageWrites::write_back() const {
  for (size_t page = 0; page < pages_->layouts().size(); ++page) paging_->write_back(page);
}

void PageWrites::bump_version(size_t parameter, By by) const {
  pages_->parameters().impl(parameter).bump_version();
  if (by == By::kUs) user_writes_->note_own(parameter);
}

void PageWrites::begin_update() {
  paging_->release_all("step()");
  const auto& page_offload = pages_->page_offload();
  const bool made_in_backward =
      page_offload && page_offload->options().step == StepWhen::kInBackward;
  if (made_in_backward) return check_unwritten_since_backward();
  masters_->take_over_writes_in_tiers();
}

void PageWrites::begin_update_in_backward(size_t page,
                                          const std::function<bool(size_t)>& has_gradient) {
  paging_->write_back(page);
  masters_->take_over_writes_in_tiers(page);
  for (const size_t index : pages_->parameters().of_page(page)) {
    if (!has_gradient(index)) continue;
    // A node of this backward that still needs the values from before is refused.
    bump_version(index, By::kUs);
    versions_[index] = pages_->parameters()[index].parameter.tensor._version();
  }
}

// Backward has made the step from what was there, and nothing follows it but step().
void PageWrites::check_unwritten_since_backward() const {
  for (size_t index = 0; index < versions_.size(); ++index) {
    const NamedParameter& parameter = pages_->parameters()[index].parameter;
    ZP_CHECK(!is_in_update(index) || versions_[index] == parameter.tensor._version(),
             "parameter \"", parameter.name(),
             "\" was written to between backward(), which has made its step already "
             "(StepWhen::kInBackward), and step(); write after step(), or use StepWhen::kInStep");
  }
}

bool PageWrites::is_any_in_update() const {
  return std::any_of(versions_.begin(), versions_.end(),
                     [](int64_t version) { return version != 0; });
}

// The update went through the pages, behind autograd's back.
void PageWrites::end_update(const std::vector<uint8_t>& updated) {
  paging_->end_step();
  for_each_in_parallel(versions_.size(), [&](size_t index) {
    if (updated[index] != 0) bump_version(index, By::kUs);
    versions_[index] = 0;
  });
  masters_->end_update();
}

void PageWrites::skip_update() {
  paging_->release_all("step()");
  paging_->end_step();
}

void PageWrites::take_over(const char* who) {
  in_place_->check(who);
  paging_->release_all(who);
  masters_->take_over_writes();
}

void PageWrites::take_over(size_t page) {
  paging_->write_back(page);
  masters_->take_over_writes(page);
}

void PageWrites::end_load() {
  for (size_t index = 0; index < versions_.size(); ++index) bump_version(index, By::kUs);
  masters_->end_load();
}

void PageWrites::note_written(const std::vector<size_t>& pages) {
  for (const size_t page : pages) {
    for (const size_t index : pages_->parameters().of_page(page)) {
      bump_version(index, By::kScript);
    }
  }
}

void PageWrites::begin_training(size_t parameter) {
  const size_t page = pages_->parameters()[parameter].page;
  if (pages_->layouts()[page].requires_grad) return;
  pages_->begin_training(page);
  paging_->write_back(page);
  masters_->begin_training(page);
}

}  // namespace zeropage::zero

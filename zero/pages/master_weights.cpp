#include "zero/pages/master_weights.h"

#include <utility>

#include "optim/adopt_copy.h"
#include "zero/pages/tier_use.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {

MasterWeights::MasterWeights(std::shared_ptr<const ParameterPages> pages,
                             std::shared_ptr<const PageMemory> memory)
    : pages_(std::move(pages)), memory_(std::move(memory)), kept_(pages_->layouts().size()) {
  for (size_t page = 0; page < kept_.size(); ++page) {
    if (pages_->offloads_optimizer(page) && kept_as(page) == MasterWeightsAs::kFp32) {
      kept_[page].copy = make_copy(page);
    }
  }
}

at::Tensor MasterWeights::make_copy(size_t page) const {
  const int64_t numel = pages_->owned(page).numel();
  if (pages_->offloads_optimizer(page)) {
    return pages_->page_offload()->values().add(page, numel, at::kFloat, 0,
                                                memory::Kind::kMasterWeights);
  }
  const memory::KindScope kind(memory::Kind::kMasterWeights);
  return pages_->shards().communicator().buffer(numel, at::kFloat).zero_();
}

void MasterWeights::make(size_t page) {
  OfPage& kept = kept_[page];
  if (kept_as(page) == MasterWeightsAs::kFp32 && !kept.copy.defined()) {
    kept.copy = make_copy(page);
  }
  if (kept_as(page) == MasterWeightsAs::kRemainders) {
    const memory::KindScope kind(memory::Kind::kMasterWeights);
    kept.remainders =
        pages_->shards().communicator().buffer(pages_->owned(page).numel(), at::kShort).zero_();
    are_split_ = true;
  }
}

void MasterWeights::begin_training(size_t page) {
  make(page);
  if (!kept_[page].copy.defined()) return;
  const TierUse use(pages_->page_offload(), page);
  kept_[page].copy.copy_(memory_->owned(page));
}

void MasterWeights::visit_owned(size_t page, TierStorage::Use use,
                                const std::function<void(const Owned&)>& visit) const {
  const TierUse in_use(pages_->page_offload(), page, use);
  visit({memory_->owned(page), kept_[page].copy, kept_[page].remainders});
}

void MasterWeights::visit(const VisitMemory& visit) const {
  for (size_t page = 0; page < kept_.size(); ++page) {
    if (!pages_->offloads_optimizer(page)) visit(kept_[page].copy, memory::Kind::kMasterWeights);
    visit(kept_[page].remainders, memory::Kind::kMasterWeights);
  }
  written_.visit(visit);
}

// The optimizer updates a copy in another tier, and the parameters are not there for a look.
bool MasterWeights::is_copied_elsewhere(size_t page) const {
  return kept_[page].copy.defined() && pages_->offloads_optimizer(page) &&
         !pages_->offloads_parameters(page);
}

void MasterWeights::begin_noticing() {
  for (size_t page = 0; page < kept_.size(); ++page) {
    if (is_copied_elsewhere(page)) written_.add(page, memory_->owned(page));
  }
}

void MasterWeights::take_over_writes() const {
  take_over_writes_in_tiers();
  for (size_t page = 0; page < kept_.size(); ++page) adopt_page(page);
}

void MasterWeights::take_over_writes(size_t page) const {
  take_over_writes_in_tiers(page);
  adopt_page(page);
}

void MasterWeights::take_over_writes_in_tiers() const {
  written_.visit_written(
      [this](size_t page, const at::Tensor& blocks) { adopt_blocks_of(page, blocks); });
}

void MasterWeights::take_over_writes_in_tiers(size_t page) const {
  written_.visit_written(
      page, [this](size_t written, const at::Tensor& blocks) { adopt_blocks_of(written, blocks); });
}

// blocks: of what this rank owns, that the user wrote to.
void MasterWeights::adopt_blocks_of(size_t page, const at::Tensor& blocks) const {
  ZP_CHECK(
      pages_->page_offload()->options().step != StepWhen::kOneStepLate || !was_updated_,
      pages_->describe(page),
      ": its parameters were written to between two steps, but with StepWhen::kOneStepLate the "
      "next update of their older values is under way already; write before the first step, or "
      "use StepWhen::kInStep");
  const TierUse use(pages_->page_offload(), page);
  adopt_blocks(kept_[page].copy, memory_->owned(page), blocks);
}

void MasterWeights::adopt_page(size_t page) const {
  if (!kept_[page].copy.defined() || is_copied_elsewhere(page)) return;
  const TierUse use(pages_->page_offload(), page);
  optim::adopt_copy(kept_[page].copy, memory_->owned(page));
}

void MasterWeights::end_update() {
  written_.note();
  was_updated_ = true;
}

}  // namespace zeropage::zero

#include "zero/pages/whole_pages.h"

#include <utility>

#include "paging/trap.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {
namespace {

constexpr const char* kHint =
    ", which an operator on a parameter gathers, so all ranks run it alike (zeropage::touch_all(), "
    "where they "
    "run other modules of a list)";

}  // namespace

WholePages::WholePages(std::shared_ptr<const ParameterPages> pages,
                       std::shared_ptr<const PageMemory> memory,
                       std::shared_ptr<UserWrites> user_writes, const paging::PagerOptions& options)
    : pages_(std::move(pages)), memory_(std::move(memory)), pager_index_(pages_->layouts().size()) {
  if (!shards_parameters(pages_->options())) return;
  paging::check_dispatcher();
  auto made = std::make_unique<ShardSource>(pages_->shards(), "page", pages_->of_model() + kHint,
                                            memory::Kind::kParameter, pages_->worlds().secondary);
  ShardSource& source = *made;
  source_ = made.get();
  source.set_before_fetch(
      [memory = memory_] { memory->check_not_parked("an operator on a parameter, or a guard"); });
  pager_ = paging::Pager::make(std::move(made), options);
  for (size_t page = 0; page < pager_index_.size(); ++page) {
    if (pages_->is_sharded(page)) hand_over(page, source, user_writes);
  }
}

void WholePages::hand_over(size_t page, ShardSource& source,
                           const std::shared_ptr<UserWrites>& user_writes) {
  const PageLayout& layout = pages_->layouts()[page];
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(layout.dtype));
  const PlacedParameters& parameters = pages_->parameters();
  std::vector<paging::Page::StorageInPage> page_storages;
  for (const Slot& slot : layout.slots) {
    const auto& sharing = pages_->storages()[slot.storage].parameters;
    for (const size_t index : sharing) paging::set_trap(parameters[index].parameter.tensor);
    page_storages.push_back(
        {parameters[sharing.front()].parameter.tensor.storage(), slot.range.begin * element_bytes});
  }
  ShardSource::Away away;
  if (pages_->offloads_parameters(page)) {
    away = {&pages_->page_offload()->parameters(), page, pages_->page_offload()};
  }
  const int64_t bytes = source.add_shard(pages_->shards(page), layout, memory_->owned(page), away,
                                         [user_writes, page](const at::Tensor& whole) {
                                           user_writes->note_written_back(page, whole);
                                         });
  pager_index_[page] = pager_->add_page(layout.name, bytes, std::move(page_storages));
}

void WholePages::add_to(paging::Pins& pins, size_t parameter, bool writes) const {
  const size_t page = pages_->parameters()[parameter].page;
  if (pages_->is_sharded(page)) pins.add({pager_, pager_index_[page]}, writes);
}

comm::Pending WholePages::start_broadcast(size_t page, int root) const {
  const at::Tensor whole =
      pages_->is_sharded(page) ? pager_->buffer(pager_index_[page]) : memory_->whole(page);
  return pages_->world().communicator().broadcast(whole, root, pages_->describe(page));
}

void WholePages::write_back(size_t page) const {
  if (pages_->is_sharded(page)) pager_->write_back(pager_index_[page]);
}

void WholePages::release_all(const char* who) const {
  if (pager_) pager_->release_all(who);
}

void WholePages::end_backward() const {
  if (pager_ && pages_->options().reshard == Reshard::kAfterBackward) pager_->release_unpinned();
}

void WholePages::end_step() const {
  if (pager_) pager_->end_pass(paging::Pass::kTraining);
}

}  // namespace zeropage::zero

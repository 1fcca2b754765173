#include "zero/pages/page_memory.h"

#include <utility>

#include "zeropage/check.h"
#include "zeropage/event_sink.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {

PageMemory::PageMemory(std::shared_ptr<const ParameterPages> pages)
    : pages_(std::move(pages)),
      compute_(device::Stream::current(pages_->world().communicator().device())),
      memory_(pages_->layouts().size()) {
  for (size_t page = 0; page < memory_.size(); ++page) {
    if (pages_->offloads_parameters(page)) memory_[page].owned = make_shard(page);
  }
}

at::Tensor PageMemory::make_shard(size_t page) const {
  const PageLayout& layout = pages_->layouts()[page];
  const memory::OwnerScope owner("page", layout.name);
  if (pages_->offloads_parameters(page)) {
    return pages_->page_offload()->parameters().add(page, layout.shard_numel, layout.dtype, 0,
                                                    memory::Kind::kParameter);
  }
  const memory::KindScope kind(memory::Kind::kParameter);
  return pages_->shards(page).communicator().buffer(layout.shard_numel, layout.dtype).zero_();
}

void PageMemory::make(size_t page) {
  OfPage& memory = memory_[page];
  if (pages_->is_sharded(page)) {
    memory.owned = make_shard(page);
    return;
  }
  const memory::KindScope kind(memory::Kind::kParameter);
  const PageLayout& layout = pages_->layouts()[page];
  const memory::OwnerScope owner("page", layout.name);
  const comm::World& shards = pages_->shards(page);
  const Range own = pages_->owned(page);
  memory.whole =
      shards.communicator().buffer(layout.padded_numel(shards.size()), layout.dtype).zero_();
  memory.owned = memory.whole.narrow(0, own.begin, own.numel());
}

comm::Pending PageMemory::start_all_gather(size_t page) const {
  return pages_->shards(page).communicator().all_gather(memory_[page].whole,
                                                        pages_->describe(page));
}

comm::Pending PageMemory::start_gather(size_t page) const {
  if (pages_->plan()[page].parameters != Sharing::kOwned) return {};
  return start_all_gather(page);
}

comm::Pending PageMemory::start_gather_shards(size_t page) const {
  if (pages_->world().size() == 1 || pages_->is_sharded(page)) return {};
  return start_all_gather(page);
}

void PageMemory::visit(const VisitMemory& visit) const {
  for (size_t page = 0; page < memory_.size(); ++page) {
    if (!pages_->offloads_parameters(page)) visit(memory_[page].owned, memory::Kind::kParameter);
  }
}

void PageMemory::check_stream(const char* who) const {
  const c10::Device device = pages_->world().communicator().device();
  ZP_CHECK(
      device::Stream::current(device) == compute_, who, ": the current stream of ", device,
      " is another than when the module was wrapped, in whose order its memory is reused; make "
      "that one current, or wrap under this one");
}

}  // namespace zeropage::zero

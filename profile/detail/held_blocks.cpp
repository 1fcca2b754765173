#include "profile/detail/held_blocks.h"

#include <tuple>

namespace zeropage::profile::detail {

using memory::LedgerEvent;
using memory::PageChange;

Change HeldBlocks::follow(const LedgerEvent& event, const Owner& owner) {
  ++events_;
  memory::Breakdown& now = now_[static_cast<size_t>(event.account)];
  Change change{.time_ns = 0,
                .bytes = event.what == LedgerEvent::What::kDischarge ? -event.bytes : event.bytes,
                .account = static_cast<uint8_t>(event.account),
                .kind = static_cast<uint8_t>(event.kind),
                .kind_before = static_cast<uint8_t>(event.kind_before)};
  if (event.what == LedgerEvent::What::kRename) now[event.kind_before] -= event.bytes;
  now[event.kind] += change.bytes;
  if (event.block == nullptr) {
    change.owner = owner.name;
    change.page = owner.page;
    return change;
  }
  if (event.what == LedgerEvent::What::kCharge) {
    blocks_[event.block] = {next_number_++, change.account, change.kind, event.bytes, owner};
  }
  const auto known = blocks_.find(event.block);
  if (known == blocks_.end()) return change;
  Block& block = known->second;
  block.kind = change.kind;
  change.owner = block.owner.name;
  change.page = block.owner.page;
  change.block = block.number;
  if (event.what == LedgerEvent::What::kDischarge) blocks_.erase(known);
  return change;
}

void HeldBlocks::follow(PageChange change, NameIndex page) {
  if (change == PageChange::kResident) is_resident_[page] = true;
  if (change == PageChange::kEvicted) is_resident_[page] = false;
}

std::vector<Holding> HeldBlocks::holdings() const {
  std::map<std::tuple<uint8_t, uint8_t, NameIndex, NameIndex>, Holding> sums;
  for (const auto& [at, block] : blocks_) {
    Holding& sum = sums[{block.account, block.kind, block.owner.name, block.owner.page}];
    sum.account = block.account;
    sum.kind = block.kind;
    sum.owner = block.owner.name;
    sum.page = block.owner.page;
    sum.bytes += block.bytes;
    ++sum.blocks;
  }
  std::vector<Holding> result;
  for (const auto& [key, sum] : sums) result.push_back(sum);
  return result;
}

std::vector<NameIndex> HeldBlocks::resident_pages() const {
  std::vector<NameIndex> pages;
  for (const auto& [page, is_resident] : is_resident_) {
    if (is_resident) pages.push_back(page);
  }
  return pages;
}

}  // namespace zeropage::profile::detail

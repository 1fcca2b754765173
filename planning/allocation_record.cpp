#include "planning/allocation_record.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "device/stream.h"
#include "operators/construction_tape.h"

namespace zeropage::planning {

void AllocationRecord::on_ledger(const memory::LedgerEvent& event) {
  using What = memory::LedgerEvent::What;
  if (event.account != memory::Account::kMeta || event.block == nullptr) return;
  if (event.what == What::kCharge) {
    const bool is_left_out =
        construction_ == Construction::kHasNoMemory && operators::ConstructionTape::is_recording();
    if (is_left_out) return;
    live_[event.block] = next_block_;
    changes_.push_back({next_block_++, event.bytes, device::simulated_stream()});
  } else if (event.what == What::kDischarge) {
    const auto known = live_.find(event.block);
    if (known == live_.end()) return;
    changes_.push_back({known->second, 0, 0});
    live_.erase(known);
  }
}

std::vector<AllocationChange> AllocationRecord::take() {
  return std::exchange(changes_, {});
}

void hold_what_stays(std::vector<AllocationChange>& held,
                     const std::vector<AllocationChange>& changes) {
  std::unordered_set<int64_t> freed;
  for (const AllocationChange& change : changes) {
    if (change.bytes == 0) freed.insert(change.block);
  }
  held.insert(held.end(), changes.begin(), changes.end());
  std::erase_if(held, [&](const AllocationChange& change) { return freed.contains(change.block); });
}

void Reserving::free(int64_t block) {
  const auto known = live_.find(block);
  if (known == live_.end()) return;
  allocator_.free(known->second);
  live_.erase(known);
}

void Reserving::apply(const std::vector<AllocationChange>& changes) {
  for (const AllocationChange& change : changes) {
    if (!so_far_.fits()) return;
    free(change.block);
    if (change.bytes == 0) continue;
    const auto address = allocator_.allocate(change.bytes, change.stream);
    if (!address) {
      so_far_.refused_bytes = change.bytes;
      so_far_.reserved_then_bytes = allocator_.reserved_bytes();
      so_far_.used_then_bytes = allocator_.used_bytes();
      return;
    }
    live_.emplace(change.block, *address);
    so_far_.peak_bytes = std::max(so_far_.peak_bytes, allocator_.reserved_bytes());
  }
}

}  // namespace zeropage::planning

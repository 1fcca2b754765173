#include "memory/mapping_pool.h"

#include <algorithm>
#include <new>
#include <sys/mman.h>

#include "memory/bytes.h"

namespace zeropage::memory {
namespace {

// A block may serve a request up to this much smaller than itself.
constexpr size_t kMostWasteShare = 8;

void* map(size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, 0);
}

void unmap(const MappingPool::Block& block) {
  munmap(block.data, block.bytes);
}

}  // namespace

MappingPool::~MappingPool() {
  for (const Block& block : idle_) unmap(block);
}

MappingPool::Block MappingPool::take(size_t bytes) {
  const auto page_bytes = static_cast<size_t>(system_page_bytes());
  const size_t rounded = (bytes + page_bytes - 1) / page_bytes * page_bytes;
  std::lock_guard lock(mutex_);
  if (const auto fit = find_fit(rounded); fit != idle_.end()) {
    const Block block = *fit;
    forget(fit);
    live_bytes_ += block.bytes;
    most_live_bytes_ = std::max(most_live_bytes_, live_bytes_);
    return block;
  }
  const size_t most_live_bytes = std::max(most_live_bytes_, live_bytes_ + rounded);
  shrink_to(most_live_bytes - rounded);
  void* data = map(rounded);
  if (data == MAP_FAILED) {
    shrink_to(live_bytes_);
    data = map(rounded);
  }
  if (data == MAP_FAILED) throw std::bad_alloc();
  most_live_bytes_ = most_live_bytes;
  // Where the system grants huge pages on request, they spare most faults. A refusal changes
  // nothing.
  madvise(data, rounded, MADV_HUGEPAGE);
  live_bytes_ += rounded;
  return {data, rounded};
}

void MappingPool::give_back(Block block) {
  std::lock_guard lock(mutex_);
  live_bytes_ -= block.bytes;
  idle_bytes_ += block.bytes;
  idle_.push_back(block);
  idle_by_bytes_.emplace(block.bytes, std::prev(idle_.end()));
}

void MappingPool::trim() {
  std::lock_guard lock(mutex_);
  shrink_to(live_bytes_);
  most_live_bytes_ = live_bytes_;
}

size_t MappingPool::live_bytes() const {
  std::lock_guard lock(mutex_);
  return live_bytes_;
}

size_t MappingPool::idle_bytes() const {
  std::lock_guard lock(mutex_);
  return idle_bytes_;
}

MappingPool::IdleList::iterator MappingPool::find_fit(size_t bytes) {
  const auto smallest = idle_by_bytes_.lower_bound(bytes);
  if (smallest == idle_by_bytes_.end() || smallest->first > bytes + bytes / kMostWasteShare) {
    return idle_.end();
  }
  return smallest->second;
}

void MappingPool::forget(IdleList::iterator idle) {
  const auto [first, last] = idle_by_bytes_.equal_range(idle->bytes);
  idle_by_bytes_.erase(
      std::find_if(first, last, [&](const auto& entry) { return entry.second == idle; }));
  idle_bytes_ -= idle->bytes;
  idle_.erase(idle);
}

void MappingPool::shrink_to(size_t limit) {
  while (!idle_.empty() && live_bytes_ + idle_bytes_ > limit) {
    const Block block = idle_.front();
    forget(idle_.begin());
    unmap(block);
  }
}

}  // namespace zeropage::memory

#include "memory/mapping_pool.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <sys/mman.h>

#include "zeropage/bytes.h"

namespace zeropage::memory {
namespace {

// Less is not unmapped of a block that is larger: a huge page of which a part is unmapped is lost to what stays.
constexpr size_t kLeastUnmapped = size_t{2} << 20;

void* map(size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, 0);
}

std::byte* begin_of(const MappingPool::Block& block) {
  return static_cast<std::byte*>(block.data);
}

std::byte* end_of(const MappingPool::Block& block) {
  return begin_of(block) + block.bytes;
}

}  // namespace

MappingPool::~MappingPool() {
  for (const Block& block : idle_) munmap(block.data, block.bytes);
}

MappingPool::Block MappingPool::take(size_t bytes) {
  const auto page_bytes = static_cast<size_t>(system_page_bytes());
  const size_t rounded = (bytes + page_bytes - 1) / page_bytes * page_bytes;
  std::lock_guard lock(mutex_);
  if (const auto fit = idle_by_bytes_.lower_bound({rounded, nullptr});
      fit != idle_by_bytes_.end()) {
    const IdleList::iterator idle = idle_by_address_.at(fit->second);
    const Block found = *idle;
    const IdleList::iterator place = forget(idle);
    if (found.bytes > rounded) {
      add_idle({begin_of(found) + rounded, found.bytes - rounded}, place);
    }
    live_bytes_ += rounded;
    most_live_bytes_ = std::max(most_live_bytes_, live_bytes_);
    return {found.data, rounded};
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
  const auto after = idle_by_address_.lower_bound(begin_of(block));
  if (after != idle_by_address_.end() && after->first == end_of(block)) {
    block.bytes += after->second->bytes;
    forget(after->second);
  }
  const auto next = idle_by_address_.lower_bound(begin_of(block));
  if (next != idle_by_address_.begin()) {
    const IdleList::iterator before = std::prev(next)->second;
    if (end_of(*before) == begin_of(block)) {
      block = {before->data, before->bytes + block.bytes};
      forget(before);
    }
  }
  add_idle(block, idle_.end());
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

void MappingPool::add_idle(const Block& block, IdleList::iterator place) {
  const IdleList::iterator idle = idle_.insert(place, block);
  idle_by_address_.emplace(begin_of(block), idle);
  idle_by_bytes_.emplace(block.bytes, begin_of(block));
  idle_bytes_ += block.bytes;
}

MappingPool::IdleList::iterator MappingPool::forget(IdleList::iterator idle) {
  idle_by_address_.erase(begin_of(*idle));
  idle_by_bytes_.erase({idle->bytes, begin_of(*idle)});
  idle_bytes_ -= idle->bytes;
  return idle_.erase(idle);
}

void MappingPool::shrink_to(size_t limit) {
  while (!idle_.empty() && live_bytes_ + idle_bytes_ > limit) {
    const Block block = idle_.front();
    const IdleList::iterator place = forget(idle_.begin());
    const size_t too_much = live_bytes_ + idle_bytes_ + block.bytes - limit;
    const size_t unmapped = std::min(block.bytes, std::max(too_much, kLeastUnmapped));
    munmap(end_of(block) - unmapped, unmapped);
    if (unmapped < block.bytes) add_idle({block.data, block.bytes - unmapped}, place);
  }
}

}  // namespace zeropage::memory

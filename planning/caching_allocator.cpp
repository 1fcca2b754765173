#include "planning/caching_allocator.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include <c10/util/Exception.h>

#include "base/exact.h"

namespace zeropage::planning {
namespace {

// The constants of c10/core/AllocatorConfig.h, and its default large_segment_size().
constexpr int64_t kLeastBlockBytes = 512;
constexpr int64_t kMostSmallBytes = int64_t{1} << 20;
constexpr int64_t kSmallSegmentBytes = int64_t{2} << 20;
constexpr int64_t kLargeSegmentBytes = int64_t{20} << 20;
constexpr int64_t kLeastOwnSegmentBytes = int64_t{10} << 20;
constexpr int64_t kSegmentRoundingBytes = int64_t{2} << 20;
// Addresses that an expandable segment may grow into. More than a device has.
constexpr int64_t kExpandableBytes = int64_t{20} << 40;

}  // namespace

CachingAllocator::Place CachingAllocator::neighbour_before(Place block) {
  if (block == blocks_.begin()) return blocks_.end();
  const Place before = std::prev(block);
  return before->second.segment == block->second.segment ? before : blocks_.end();
}

CachingAllocator::Place CachingAllocator::neighbour_after(Place block) {
  const Place after = std::next(block);
  const bool is_near = after != blocks_.end() && after->second.segment == block->second.segment;
  return is_near ? after : blocks_.end();
}

std::optional<CachingAllocator::Address> CachingAllocator::allocate(int64_t bytes, int64_t stream) {
  TORCH_INTERNAL_ASSERT(bytes > 0);
  const int64_t rounded = base::round_up(bytes, kLeastBlockBytes);
  const Request request{rounded, stream, rounded <= kMostSmallBytes ? Pool::kSmall : Pool::kLarge};
  std::optional<Place> found = find_free(request);
  if (!found) found = take_segment(request);
  if (!found) {
    release_cached();
    found = take_segment(request);
  }
  if (!found) return std::nullopt;
  const int64_t rest = (*found)->second.bytes - request.bytes;
  const bool keeps_any_rest = request.pool == Pool::kSmall || options_.expandable_segments;
  if (keeps_any_rest ? rest >= kLeastBlockBytes : rest > kMostSmallBytes) {
    put_away(split(*found, request.bytes));
  }
  (*found)->second.is_used = true;
  used_bytes_ += (*found)->second.bytes;
  return (*found)->first;
}

void CachingAllocator::free(Address address) {
  const Place block = blocks_.find(address);
  TORCH_INTERNAL_ASSERT(block != blocks_.end() && block->second.is_used);
  block->second.is_used = false;
  used_bytes_ -= block->second.bytes;
  put_away(join_neighbours(block));
}

// What a free block has with the addresses behind it that have no memory yet.
int64_t CachingAllocator::bytes_to_grow_to(Place block) {
  const Place after = neighbour_after(block);
  const bool can_grow = after != blocks_.end() && !after->second.is_mapped;
  return block->second.bytes + (can_grow ? after->second.bytes : 0);
}

// The smallest; where segments expand, a block counts with what it can grow to, so that the last one of a segment
// is taken last.
std::optional<CachingAllocator::Place> CachingAllocator::find_free(const Request& request) {
  auto& free = of(request.pool).free;
  auto at = free.lower_bound({request.stream, request.bytes, 0});
  const auto is_of_stream = [&](auto place) {
    return place != free.end() && std::get<0>(*place) == request.stream;
  };
  if (!is_of_stream(at)) return std::nullopt;
  const auto bytes_of = [&](auto place) {
    return bytes_to_grow_to(blocks_.find(std::get<2>(*place)));
  };
  if (options_.expandable_segments) {
    for (auto next = std::next(at); is_of_stream(next) && bytes_of(next) < bytes_of(at); ++next) {
      at = next;
    }
  }
  const Place block = blocks_.find(std::get<2>(*at));
  free.erase(at);
  return block;
}

std::optional<CachingAllocator::Place> CachingAllocator::take_segment(const Request& request) {
  int64_t bytes = base::round_up(request.bytes, kSegmentRoundingBytes);
  if (request.pool == Pool::kSmall) {
    bytes = kSmallSegmentBytes;
  } else if (request.bytes < kLeastOwnSegmentBytes) {
    bytes = kLargeSegmentBytes;
  }
  if (options_.limit_bytes != 0 && reserved_bytes_ + bytes > options_.limit_bytes) {
    return std::nullopt;
  }
  if (options_.expandable_segments) return grow_segment(request);
  reserved_bytes_ += bytes;
  const Address begin = next_segment_;
  next_segment_ += bytes;
  return blocks_.insert({begin, {bytes, request.stream, begin, request.pool}}).first;
}

// Maps what is missing behind the first place with room for the request.
CachingAllocator::Place CachingAllocator::grow_segment(const Request& request) {
  Place block = find_room(request);
  if (!block->second.is_mapped) block = map(block, std::min(block->second.bytes, request.bytes));
  while (block->second.bytes < request.bytes) {
    const Place unmapped = neighbour_after(block);
    block = map(unmapped, std::min(unmapped->second.bytes, request.bytes - block->second.bytes));
  }
  const Block& found = block->second;
  of(found.pool).free.erase({found.stream, found.bytes, block->first});
  return block;
}

// The lowest address from which idle blocks, with memory and without, are enough together.
CachingAllocator::Place CachingAllocator::find_room(const Request& request) {
  auto& unmapped = of(request.pool).unmapped;
  for (auto at = unmapped.lower_bound({request.stream, 0});
       at != unmapped.end() && std::get<0>(*at) == request.stream; ++at) {
    Place first = blocks_.find(std::get<1>(*at));
    if (const Place before = neighbour_before(first); is_idle(before)) first = before;
    int64_t bytes = 0;
    for (Place block = first; bytes < request.bytes && is_idle(block);
         block = neighbour_after(block)) {
      bytes += block->second.bytes;
    }
    if (bytes >= request.bytes) return first;
  }
  const Address begin = next_segment_;
  next_segment_ += kExpandableBytes;
  unmapped.insert({request.stream, begin});
  Block block{kExpandableBytes, request.stream, begin, request.pool};
  block.is_mapped = false;
  return blocks_.insert({begin, block}).first;
}

// Gives the first bytes of a block memory, in whole granules. It joins what is free around it.
CachingAllocator::Place CachingAllocator::map(Place block, int64_t bytes) {
  const bool is_small = block->second.pool == Pool::kSmall;
  const int64_t mapped = base::round_up(bytes, is_small ? kSmallSegmentBytes : kLargeSegmentBytes);
  auto& unmapped = of(block->second.pool).unmapped;
  unmapped.erase({block->second.stream, block->first});
  if (mapped < block->second.bytes) {
    const Place rest = split(block, mapped);
    unmapped.insert({rest->second.stream, rest->first});
  }
  block->second.is_mapped = true;
  reserved_bytes_ += mapped;
  const Place joined = join_neighbours(block);
  put_away(joined);
  return joined;
}

void CachingAllocator::unmap_whole_granules(Place block) {
  const Block before = block->second;
  const int64_t granule = before.pool == Pool::kSmall ? kSmallSegmentBytes : kLargeSegmentBytes;
  const Address offset = block->first - before.segment;
  const int64_t head = base::round_up(offset, granule) - offset;
  const int64_t whole = (offset + before.bytes) / granule * granule - offset - head;
  if (whole <= 0) return;
  OfPool& pool = of(before.pool);
  pool.free.erase({before.stream, before.bytes, block->first});
  if (head > 0) {
    const Place rest = split(block, head);
    put_away(block);
    block = rest;
  }
  if (block->second.bytes > whole) put_away(split(block, whole));
  block->second.is_mapped = false;
  reserved_bytes_ -= whole;
  block = join_neighbours(block);
  pool.unmapped.insert({block->second.stream, block->first});
}

void CachingAllocator::release_cached() {
  for (OfPool& pool : pools_) {
    std::vector<Address> free;
    for (const auto& [stream, bytes, address] : pool.free) free.push_back(address);
    for (const Address address : free) {
      const Place block = blocks_.find(address);
      if (options_.expandable_segments) {
        unmap_whole_granules(block);
        continue;
      }
      const bool is_whole =
          neighbour_before(block) == blocks_.end() && neighbour_after(block) == blocks_.end();
      if (!is_whole) continue;
      pool.free.erase({block->second.stream, block->second.bytes, address});
      reserved_bytes_ -= block->second.bytes;
      blocks_.erase(block);
    }
  }
}

// The second part, which belongs to no set yet; `block` keeps the first.
CachingAllocator::Place CachingAllocator::split(Place block, int64_t bytes) {
  Block rest = block->second;
  rest.bytes -= bytes;
  rest.is_used = false;
  block->second.bytes = bytes;
  return blocks_.insert({block->first + bytes, rest}).first;
}

// With idle neighbours that have memory, or have none, as it does. It belongs to no set.
CachingAllocator::Place CachingAllocator::join_neighbours(Place block) {
  const auto take_out = [this](Place idle) {
    const Block& taken = idle->second;
    OfPool& pool = of(taken.pool);
    pool.free.erase({taken.stream, taken.bytes, idle->first});
    pool.unmapped.erase({taken.stream, idle->first});
  };
  const auto joins = [&](Place other) {
    return is_idle(other) && other->second.is_mapped == block->second.is_mapped;
  };
  if (const Place after = neighbour_after(block); joins(after)) {
    take_out(after);
    block->second.bytes += after->second.bytes;
    blocks_.erase(after);
  }
  if (const Place before = neighbour_before(block); joins(before)) {
    take_out(before);
    before->second.bytes += block->second.bytes;
    blocks_.erase(block);
    return before;
  }
  return block;
}

void CachingAllocator::put_away(Place block) {
  const Block& free = block->second;
  of(free.pool).free.insert({free.stream, free.bytes, block->first});
}

}  // namespace zeropage::planning

// LibTorch's CUDA caching allocator without a device: what it would take from one, for the same requests in the
// same order.
//
// It rounds a request up to 512 bytes and looks for the smallest free block of the stream that is large enough.
// Without one it takes a segment from the device: 2 MiB for requests of up to 1 MiB, 20 MiB for those below 10 MiB,
// else the request rounded up to 2 MiB. Of a block that is larger the rest stays free, if it is more than 1 MiB, or
// the request is one of up to 1 MiB. Segments go back to the device only where a request would pass the limit. With
// expandable segments each stream has one segment for small and one for large requests, which grow by 2 and 20 MiB,
// and any rest stays free. (c10/cuda/CUDACachingAllocator.cpp in LibTorch 2.11; no setting but expandable_segments.)
//
// Threads: one at a time. Sizes in bytes.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>

namespace zeropage::planning {

class CachingAllocator {
 public:
  struct Options {
    bool expandable_segments = false;
    // The most that it takes, as of setMemoryFraction(); 0: no limit.
    int64_t limit_bytes = 0;
  };
  using Address = int64_t;

  explicit CachingAllocator(const Options& options) : options_(options) {}

  // bytes: 1 or more. Nothing where the limit does not let it, after what is cached has gone back.
  std::optional<Address> allocate(int64_t bytes, int64_t stream);
  // REQUIRES: allocate() returned it, and it was not freed since.
  void free(Address address);
  // Gives back to the device what is cached in whole segments.
  void release_cached();

  // What it has from the device now, and what of that is in use, in whole blocks.
  int64_t reserved_bytes() const { return reserved_bytes_; }
  int64_t used_bytes() const { return used_bytes_; }

 private:
  enum class Pool : uint8_t { kSmall, kLarge };
  struct Block {
    int64_t bytes = 0;
    int64_t stream = 0;
    Address segment = 0;  // where the segment that it lies in begins
    Pool pool = Pool::kLarge;
    bool is_used = false;
    bool is_mapped = true;  // else it is a part of an expandable segment without memory
  };
  using Blocks = std::map<Address, Block>;
  using Place = Blocks::iterator;
  struct Request {
    int64_t bytes;  // rounded
    int64_t stream;
    Pool pool;
  };
  struct OfPool {
    std::set<std::tuple<int64_t, int64_t, Address>> free;  // stream, bytes, address
    std::set<std::tuple<int64_t, Address>> unmapped;       // stream, address
  };

  OfPool& of(Pool pool) { return pools_[static_cast<size_t>(pool)]; }
  Place neighbour_before(Place block);
  Place neighbour_after(Place block);
  bool is_idle(Place block) const { return block != blocks_.end() && !block->second.is_used; }
  int64_t bytes_to_grow_to(Place block);

  std::optional<Place> find_free(const Request& request);
  std::optional<Place> take_segment(const Request& request);
  Place grow_segment(const Request& request);
  Place find_room(const Request& request);
  Place map(Place block, int64_t bytes);
  void unmap_whole_granules(Place block);
  Place split(Place block, int64_t bytes);
  Place join_neighbours(Place block);
  void put_away(Place block);

  const Options options_;
  std::array<OfPool, 2> pools_;
  Blocks blocks_;
  Address next_segment_ = 0;
  int64_t reserved_bytes_ = 0;
  int64_t used_bytes_ = 0;
};

}  // namespace zeropage::planning

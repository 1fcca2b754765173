// What a simulated rank takes of its device's memory and gives back, in order, so that an allocator can be asked what
// it would reserve for that (planning/caching_allocator.h).
//
// Lifetime: as of an EventSink. Threads: recorded under the ledger's mutex; changes() is for who knows that nothing
// is being recorded.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "planning/caching_allocator.h"
#include "zeropage/event_sink.h"

namespace zeropage::planning {

struct AllocationChange {
  int64_t block;   // tells blocks of a record apart, also those that follow each other in one place
  int64_t bytes;   // 0: it is freed
  int64_t stream;  // device::simulated_stream()
};

// What a simulated step allocates on the meta device.
class AllocationRecord final : public memory::EventSink {
 public:
  // What a DeferredModule's constructor makes there has no memory in a real run; what is made in its stead for a module
  // with values has.
  enum class Construction : uint8_t { kHasNoMemory, kIsOnTheDevice };

  explicit AllocationRecord(Construction construction = Construction::kHasNoMemory)
      : construction_(construction) {}

  void on_ledger(const memory::LedgerEvent& event) override;
  void on_page(const memory::PageEvent& /*event*/) override {}
  void on_span(const memory::Span& /*span*/) override {}

  // Since the last call.
  std::vector<AllocationChange> take();

 private:
  const Construction construction_;
  std::vector<AllocationChange> changes_;
  std::unordered_map<const void*, int64_t> live_;  // block by its place
  int64_t next_block_ = 0;
};

// Adds to `held` what the changes leave allocated, and takes out what they free.
void hold_what_stays(std::vector<AllocationChange>& held,
                     const std::vector<AllocationChange>& changes);

// What an allocator makes of changes.
struct Reservation {
  int64_t peak_bytes = 0;  // the most that it had from the device
  // The request that did not fit below the limit, and what was reserved and used then. 0: all requests did.
  int64_t refused_bytes = 0;
  int64_t reserved_then_bytes = 0;
  int64_t used_then_bytes = 0;

  bool fits() const { return refused_bytes == 0; }
};

// The changes that an allocator sees, one part after the other. A part may come again: what is left of it then makes
// room for its next self. Frees of blocks that it never saw do nothing.
class Reserving {
 public:
  explicit Reserving(const CachingAllocator::Options& options) : allocator_(options) {}

  // Ends with the first request that does not fit.
  void apply(const std::vector<AllocationChange>& changes);
  // Gives back whole segments, which wrapping does once a module that was on the device is in its pages.
  void release_cached() { allocator_.release_cached(); }
  const Reservation& so_far() const { return so_far_; }

 private:
  void free(int64_t block);

  CachingAllocator allocator_;
  std::unordered_map<int64_t, CachingAllocator::Address> live_;
  Reservation so_far_;
};

}  // namespace zeropage::planning

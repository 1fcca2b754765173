#include "tests/harness/fake_accelerator/pinned_cache.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/CachingHostAllocator.h>

#include "tests/harness/fake_accelerator/stream.h"

namespace zeropage::testing {
namespace {

constexpr size_t kPinnedAlignment = 512;
constexpr int kPinnedGarbage = 0xFF;  // NaN in every floating type

using EventPointer = std::shared_ptr<FakeEvent>;
using PinnedBlock = at::HostBlock<c10::Stream>;

class PinnedCache final
    : public at::CachingHostAllocatorImpl<c10::Stream, EventPointer, PinnedBlock> {
 public:
  std::pair<void*, void*> allocate(size_t bytes) override {
    const auto block = CachingHostAllocatorImpl::allocate(bytes);
    if (block.first != nullptr) std::memset(block.first, kPinnedGarbage, bytes);
    return block;
  }
  bool holds(const void* data) {
    const std::lock_guard lock(mutex_);
    const auto after = ends_.upper_bound(data);
    return after != ends_.begin() && data < std::prev(after)->second;
  }

 private:
  void allocate_host_memory(size_t bytes, void** data) override {
    // Such an address is a multiple of no more, so who needs more has to look for it.
    const size_t room = bytes + 2 * kPinnedAlignment;
    auto* const begin =
        static_cast<char*>(std::aligned_alloc(2 * kPinnedAlignment, room)) + kPinnedAlignment;
    *data = begin;
    const std::lock_guard lock(mutex_);
    ends_[begin] = begin + bytes;
  }
  void free_block(PinnedBlock* /*block*/) override {}
  void record_stream(std::optional<std::vector<EventPointer>>& events,
                     c10::Stream stream) override {
    const EventPointer& event = events->emplace_back(std::make_shared<FakeEvent>());
    const uint64_t version = event->begin_record(stream.device_index());
    fake_stream(stream).enqueue("an event", [event, version] { event->reach(version); });
  }
  bool query_event(EventPointer& event) override { return event->has_reached(1); }

  std::mutex mutex_;
  std::map<const void*, const void*> ends_;  // guarded by mutex_
};

// Never destroyed: tensors of static lifetime may be freed after main().
PinnedCache& pinned_cache() {
  static auto* const cache = new PinnedCache;
  return *cache;
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto [data, block] = pinned_cache().allocate(bytes);
    return {data, block, raw_deleter(), c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* block) { pinned_cache().free(block); };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

c10::Allocator* fake_pinned_allocator() {
  static auto* const allocator = new PinnedAllocator;
  return allocator;
}

bool is_fake_pinned(const void* data) {
  return pinned_cache().holds(data);
}

bool record_pinned_use(const void* data, void* context, c10::Stream stream) {
  return pinned_cache().record_event(const_cast<void*>(data), context, stream);
}

}  // namespace zeropage::testing

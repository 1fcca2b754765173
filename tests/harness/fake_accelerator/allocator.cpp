#include "tests/harness/fake_accelerator/allocator.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>

#include "tests/harness/fake_accelerator/counters.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "tests/harness/fake_accelerator/stream.h"
#include "zeropage/bytes.h"

namespace zeropage::testing {
namespace {

using c10::DeviceIndex;
using planning::CachingAllocator;
using DeviceStats = c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kRounding = 512;
constexpr int64_t kUnlimitedBytes = int64_t{1} << 40;
constexpr int kGarbage = 0xFF;  // NaN in every floating type

struct Block {
  void* data;
  size_t bytes;
  c10::Stream stream;  // the owner
  // Guarded by the allocator's mutex.
  std::vector<c10::Stream> also_used_on;
};

// Freed after record_stream(): free once the events are reached.
struct Recorded {
  Block* block;
  std::vector<std::shared_ptr<FakeEvent>> events;
};

// What LibTorch's allocator would reserve for the blocks.
struct Segments {
  CachingAllocator allocator;
  std::unordered_map<const Block*, CachingAllocator::Address> known;

  bool take(const Block& block) {
    const auto address = allocator.allocate(static_cast<int64_t>(block.bytes), block.stream.id());
    if (address) known[&block] = *address;
    return address.has_value();
  }
  void free(const Block& block) {
    const auto at = known.find(&block);
    if (at == known.end()) return;
    allocator.free(at->second);
    known.erase(at);
  }
};

struct Account {
  FakeMemory memory;
  int64_t limit_bytes = 0;
  std::optional<Segments> segments;
};

void fill_with_garbage(const Block& block) {
  fake_stream(block.stream).enqueue("a fill", [data = block.data, bytes = block.bytes] {
    std::memset(data, kGarbage, bytes);
  });
}

class FakeAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Stream stream = current_fake_stream(-1);
    if (bytes == 0) return {nullptr, stream.device()};
    Block* block = take(round_up(bytes), stream);
    fill_with_garbage(*block);
    observe(true, *block);
    return {block->data, block, &give_back, stream.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    fake_stream(current_fake_stream(-1)).enqueue("a copy", [to, from, bytes] {
      std::memcpy(to, from, bytes);
    });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    const std::lock_guard lock(mutex_);
    for (Account& of_device : accounts_) {
      if (of_device.segments) of_device.segments->allocator.release_cached();
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    ++live_counters().record_stream;
    if (data.get_deleter() != &give_back) return;
    auto* block = static_cast<Block*>(data.get_context());
    if (block == nullptr || block->stream == stream) return;
    const std::lock_guard lock(mutex_);
    block->also_used_on.push_back(stream);
  }
  DeviceStats getDeviceStats(DeviceIndex device) override {
    const FakeMemory held = memory(device);
    DeviceStats stats;
    stats.allocated_bytes[0].current = held.current_bytes;
    stats.allocated_bytes[0].peak = held.peak_bytes;
    stats.reserved_bytes = stats.allocated_bytes;
    if (held.reserved_bytes > 0) stats.reserved_bytes[0].current = held.reserved_bytes;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    const auto& [held, limit_bytes, segments] = account(device);
    const int64_t total = limit_bytes > 0 ? limit_bytes : kUnlimitedBytes;
    return {static_cast<size_t>(total - held.current_bytes), static_cast<size_t>(total)};
  }
  void resetPeakStats(DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    FakeMemory& held = account(device).memory;
    held.peak_bytes = held.current_bytes;
    held.peak_reserved_bytes = reserved(account(device));
  }

  FakeMemory memory(DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    FakeMemory held = account(device).memory;
    held.reserved_bytes = reserved(account(device));
    return held;
  }
  void set_segments(DeviceIndex device, const CachingAllocator::Options& options) {
    const std::lock_guard lock(mutex_);
    account(device).segments.emplace(Segments{CachingAllocator(options), {}});
    account(device).memory.peak_reserved_bytes = 0;
  }
  void limit(DeviceIndex device, int64_t most_bytes) {
    const std::lock_guard lock(mutex_);
    account(device).limit_bytes = most_bytes;
  }
  void set_observer(FakeMemoryObserver observer) {
    const std::lock_guard lock(mutex_);
    observer_ = std::move(observer);
  }
  void set_observer(FakeShortageObserver observer) {
    const std::lock_guard lock(mutex_);
    shortage_observer_ = std::move(observer);
  }
  c10::Device device_of(const void* data) {
    const std::lock_guard lock(mutex_);
    const auto after = by_address_.upper_bound(data);
    const Block* block = after == by_address_.begin() ? nullptr : std::prev(after)->second;
    TORCH_CHECK(block && data < static_cast<char*>(block->data) + block->bytes,
                "no fake device handed out the address ", data);
    return block->stream.device();
  }

 private:
  using Place = std::tuple<DeviceIndex, c10::StreamId, size_t>;  // size: of the block

  static size_t round_up(size_t bytes) { return (bytes + kRounding - 1) / kRounding * kRounding; }
  static Place place_of(size_t bytes, c10::Stream stream) {
    return {stream.device_index(), stream.id(), bytes};
  }
  static void give_back(void* context);

  Account& account(DeviceIndex device) { return accounts_.at(static_cast<size_t>(device)); }
  static int64_t reserved(const Account& of_device) {
    return of_device.segments ? of_device.segments->allocator.reserved_bytes() : 0;
  }

  // In a segment, where the device has them. Where there is no room the block stays for the next one.
  Block* placed(std::unique_lock<std::mutex>& lock, Block* block) {
    auto& [held, limit_bytes, segments] = account(block->stream.device_index());
    if (!segments) return block;
    if (!segments->take(*block)) {
      held.current_bytes -= static_cast<int64_t>(block->bytes);
      free_[place_of(block->bytes, block->stream)].push_back(block);
      refuse(lock, block->bytes, block->stream);
    }
    held.peak_reserved_bytes =
        std::max(held.peak_reserved_bytes, segments->allocator.reserved_bytes());
    return block;
  }

  Block* take(size_t bytes, c10::Stream stream) {
    std::unique_lock lock(mutex_);
    auto& [held, limit_bytes, segments] = account(stream.device_index());
    const auto more = static_cast<int64_t>(bytes);
    if (limit_bytes != 0 && held.current_bytes + more > limit_bytes) refuse(lock, bytes, stream);
    held.current_bytes += more;
    held.peak_bytes = std::max(held.peak_bytes, held.current_bytes);
    collect_recorded();
    auto& free = free_[place_of(bytes, stream)];
    if (!free.empty()) {
      Block* block = free.back();
      free.pop_back();
      return placed(lock, block);
    }
    auto* block = new Block{std::aligned_alloc(kRounding, bytes), bytes, stream, {}};
    by_address_[block->data] = block;
    return placed(lock, block);
  }

  [[noreturn]] void refuse(std::unique_lock<std::mutex>& lock, size_t bytes, c10::Stream stream) {
    const Account now = account(stream.device_index());
    const FakeShortageObserver observer = shortage_observer_;
    lock.unlock();
    const bool by_segments = now.limit_bytes == 0;
    const int64_t limit_bytes = by_segments ? reserved(now) : now.limit_bytes;
    const int64_t held_bytes =
        by_segments ? now.segments->allocator.used_bytes() : now.memory.current_bytes;
    const auto limit = static_cast<size_t>(limit_bytes);
    const auto free = by_segments ? size_t{0} : limit - static_cast<size_t>(held_bytes);
    if (observer) observer(stream.device_index(), bytes, limit, free);
    C10_THROW_ERROR(
        OutOfMemoryError,
        c10::str(stream.device(),
                 by_segments ? " is out of memory in segments: " : " is out of memory: ",
                 memory::format_bytes(static_cast<int64_t>(bytes)), " were asked for, ",
                 memory::format_bytes(held_bytes), " of ", memory::format_bytes(limit_bytes),
                 " are held"));
  }

  void free(Block* block) {
    observe(false, *block);
    const std::lock_guard lock(mutex_);
    Account& of_device = account(block->stream.device_index());
    of_device.memory.current_bytes -= static_cast<int64_t>(block->bytes);
    if (of_device.segments) of_device.segments->free(*block);
    if (block->also_used_on.empty()) {
      fill_with_garbage(*block);
      free_[place_of(block->bytes, block->stream)].push_back(block);
      return;
    }
    Recorded recorded{block, {}};
    for (const c10::Stream& stream : std::exchange(block->also_used_on, {})) {
      auto event = recorded.events.emplace_back(std::make_shared<FakeEvent>());
      const uint64_t version = event->begin_record(stream.device_index());
      fake_stream(stream).enqueue("an event", [event, version] { event->reach(version); });
    }
    recorded_.push_back(std::move(recorded));
  }

  void collect_recorded() {
    std::erase_if(recorded_, [this](const Recorded& one) {
      const bool reached = std::all_of(one.events.begin(), one.events.end(),
                                       [](const auto& event) { return event->has_reached(1); });
      if (reached) free_[place_of(one.block->bytes, one.block->stream)].push_back(one.block);
      return reached;
    });
  }

  void observe(bool allocated, const Block& block) {
    FakeMemoryObserver observer;
    {
      const std::lock_guard lock(mutex_);
      observer = observer_;
    }
    if (observer) observer(allocated, block.data, block.bytes, block.stream.device_index());
  }

  std::mutex mutex_;
  // Guarded by mutex_.
  std::array<Account, kFakeDevices> accounts_;
  std::map<Place, std::vector<Block*>> free_;
  std::vector<Recorded> recorded_;
  std::map<const void*, Block*> by_address_;
  FakeMemoryObserver observer_;
  FakeShortageObserver shortage_observer_;
};

// Never destroyed: tensors of static lifetime may be freed after main().
FakeAllocator& allocator() {
  static auto* const allocator = new FakeAllocator;
  return *allocator;
}

void FakeAllocator::give_back(void* context) {
  allocator().free(static_cast<Block*>(context));
}

}  // namespace

c10::Allocator* fake_allocator() {
  return &allocator();
}

c10::Device fake_device_of(const void* data) {
  return allocator().device_of(data);
}

void record_on_fake_stream(const c10::DataPtr& data, c10::Stream stream) {
  allocator().recordStream(data, stream);
}

FakeMemory fake_memory(DeviceIndex device) {
  return allocator().memory(device);
}

void reset_fake_peak(DeviceIndex device) {
  allocator().resetPeakStats(device);
}

void set_fake_memory_limit(DeviceIndex device, int64_t most_bytes) {
  allocator().limit(device, most_bytes);
}

void set_fake_segments(DeviceIndex device, const CachingAllocator::Options& options) {
  allocator().set_segments(device, options);
}

void set_fake_memory_observer(FakeMemoryObserver observer) {
  allocator().set_observer(std::move(observer));
}

void set_fake_shortage_observer(FakeShortageObserver observer) {
  allocator().set_observer(std::move(observer));
}

}  // namespace zeropage::testing

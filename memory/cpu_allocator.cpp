#include "memory/cpu_allocator.h"

#include <atomic>
#include <malloc.h>
#include <new>
#include <unordered_set>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include "memory/bytes.h"
#include "memory/check.h"
#include "memory/mapping_pool.h"

namespace zeropage::memory {
namespace {

struct BlockHeader;
using BlockSet = std::unordered_set<BlockHeader*>;

struct BlockHeader {
  size_t bytes;
  size_t mapped_bytes;  // 0 for a block of the heap
  Kind kind;
  std::shared_ptr<Ledger> ledger;
  std::atomic<BlockSet*> survivors;  // the SurvivorScope's set that this block is in, or null
};

// Keeps the data behind the header as aligned as LibTorch's own blocks.
constexpr size_t kHeaderBytes = 64;
static_assert(sizeof(BlockHeader) <= kHeaderBytes);

// From here on a block is a mapping of its own: large enough that rounding to pages is below 2 %.
constexpr size_t kLeastMappedBytes = static_cast<size_t>(256_KiB);

// Never destroyed: tensors of static storage duration are freed after us.
MappingPool& mappings() {
  static auto* const pool = new MappingPool;
  return *pool;
}

std::atomic<int64_t> allocated_bytes{0};
thread_local BlockSet* survivors_of_thread = nullptr;

// Guards every BlockSet: a block may be freed on another thread than the scope's.
std::mutex& survivors_mutex() {
  static auto* const instance = new std::mutex;
  return *instance;
}

BlockHeader* header_of(void* data) {
  return reinterpret_cast<BlockHeader*>(static_cast<char*>(data) - kHeaderBytes);
}

void release(void* data) {
  if (data == nullptr) return;
  BlockHeader* header = header_of(data);
  if (header->survivors.load(std::memory_order_acquire) != nullptr) {
    std::lock_guard lock(survivors_mutex());
    if (BlockSet* set = header->survivors.load(std::memory_order_relaxed)) set->erase(header);
  }
  header->ledger->discharge(header->kind, static_cast<int64_t>(header->bytes));
  allocated_bytes.fetch_sub(static_cast<int64_t>(header->bytes), std::memory_order_relaxed);
  c10::profiledCPUMemoryReporter().Delete(data);
  const size_t mapped_bytes = header->mapped_bytes;
  header->~BlockHeader();
  if (mapped_bytes > 0) {
    mappings().give_back({header, mapped_bytes});
  } else {
    c10::free_cpu(header);
  }
}

// A block of the heap has no mapped bytes.
MappingPool::Block take(size_t bytes) {
  if (bytes < kLeastMappedBytes) return {c10::alloc_cpu(bytes), 0};
  try {
    return mappings().take(bytes);
  } catch (const std::bad_alloc&) {
    ZP_THROW("out of host memory: ", format_bytes(static_cast<int64_t>(bytes)), " asked for, ",
             format_bytes(allocated_bytes.load()),
             " held; use more ranks, a higher stage or a smaller batch");
  }
}

class LedgerCpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device host(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, host};
    const MappingPool::Block block = take(bytes + kHeaderBytes);
    auto* header = new (block.data)
        BlockHeader{bytes, block.bytes, current_kind(), Ledger::current(), survivors_of_thread};
    if (survivors_of_thread != nullptr) {
      std::lock_guard lock(survivors_mutex());
      survivors_of_thread->insert(header);
    }
    header->ledger->charge(header->kind, static_cast<int64_t>(bytes));
    allocated_bytes.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
    void* data = static_cast<char*>(block.data) + kHeaderBytes;
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &release, host};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

// Before main(), so that no tensor of the program escapes; LibTorch is initialised before us
// because we link to it.
const bool installed = [] {
  static auto* const allocator = new LedgerCpuAllocator;
  c10::SetCPUAllocator(allocator, /*priority=*/100);
  return true;
}();

}  // namespace

int64_t host_allocated_bytes() {
  return allocated_bytes.load(std::memory_order_relaxed);
}

void return_idle_memory() {
  mappings().trim();
  malloc_trim(/*pad=*/0);
}

bool assign(const at::Tensor& tensor, Kind kind) {
  const c10::DataPtr& data = tensor.storage().data_ptr();
  if (data.get() == nullptr || data.get_deleter() != &release) return false;
  BlockHeader* header = header_of(data.get_context());
  const auto bytes = static_cast<int64_t>(header->bytes);
  const std::shared_ptr<Ledger>& target = Ledger::current();
  if (header->ledger == target) {
    target->rename(header->kind, kind, bytes);
  } else {
    header->ledger->discharge(header->kind, bytes);
    target->charge(kind, bytes);
    header->ledger = target;
  }
  header->kind = kind;
  return true;
}

SurvivorScope::SurvivorScope(Kind survivors)
    : survivors_(survivors), temporaries_(Kind::kStaging), before_(survivors_of_thread) {
  blocks_ = survivors_of_thread = new BlockSet;
}

SurvivorScope::~SurvivorScope() {
  std::unique_ptr<BlockSet> blocks(static_cast<BlockSet*>(blocks_));
  std::lock_guard lock(survivors_mutex());
  for (BlockHeader* header : *blocks) {
    header->ledger->rename(header->kind, survivors_, static_cast<int64_t>(header->bytes));
    header->kind = survivors_;
    header->survivors.store(nullptr, std::memory_order_release);
  }
  survivors_of_thread = static_cast<BlockSet*>(before_);
}

}  // namespace zeropage::memory

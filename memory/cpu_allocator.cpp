#include <atomic>
#include <malloc.h>
#include <new>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include "memory/charged_block.h"
#include "memory/mapping_pool.h"
#include "memory/memory_limit.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::memory {
namespace {

struct BlockHeader {
  size_t mapped_bytes;  // 0 for a block of the heap
  ChargedBlock charge;
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

BlockHeader* header_of(void* data) {
  return reinterpret_cast<BlockHeader*>(static_cast<char*>(data) - kHeaderBytes);
}

// A block of the heap has no mapped bytes.
void give_back(const MappingPool::Block& block) {
  if (block.bytes > 0) {
    mappings().give_back(block);
  } else {
    c10::free_cpu(block.data);
  }
}

void release(void* data) {
  if (data == nullptr) return;
  BlockHeader* header = header_of(data);
  allocated_bytes.fetch_sub(header->charge.bytes(), std::memory_order_relaxed);
  c10::profiledCPUMemoryReporter().Delete(data);
  const size_t mapped_bytes = header->mapped_bytes;
  {
    const HostAllocatorScope ours;
    header->~BlockHeader();
  }
  give_back({header, mapped_bytes});
}

MappingPool::Block take(size_t bytes) {
  if (bytes < kLeastMappedBytes) return {c10::alloc_cpu(bytes), 0};
  try {
    return mappings().take(bytes);
  } catch (const std::bad_alloc&) {
    const auto asked = static_cast<int64_t>(bytes);
    throw_shortage(
        *Ledger::current(),
        c10::str("out of host memory: ", describe_request(current_kind(), asked), " asked for, ",
                 format_bytes(allocated_bytes.load()), " held in this process"),
        {.device = c10::DeviceType::CPU,
         .kind = current_kind(),
         .asked_bytes = asked,
         .missing_bytes = asked,
         .counts_host_tier = true});
  }
}

class LedgerCpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device host(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, host};
    const MappingPool::Block block = take(bytes + kHeaderBytes);
    // Before the ledger counts it, so that who looks at the ledger finds both figures equal.
    allocated_bytes.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
    try {
      const HostAllocatorScope ours;
      new (block.data) BlockHeader{block.bytes, {static_cast<int64_t>(bytes), host.type()}};
    } catch (...) {
      // It would pass a limit.
      allocated_bytes.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
      give_back(block);
      throw;
    }
    void* data = static_cast<char*>(block.data) + kHeaderBytes;
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &release, host};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

}  // namespace

bool observe_host_memory() {
  static const bool installed = [] {
    static auto* const allocator = new LedgerCpuAllocator;
    c10::SetCPUAllocator(allocator, /*priority=*/100);
    return true;
  }();
  return installed;
}

int64_t host_allocated_bytes() {
  return allocated_bytes.load(std::memory_order_relaxed);
}

void return_idle_memory() {
  mappings().trim();
  malloc_trim(/*pad=*/0);
}

ChargedBlock* host_block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &release ? &header_of(data.get_context())->charge : nullptr;
}

}  // namespace zeropage::memory

// Before main(), so that no tensor of the program escapes; LibTorch is initialised before us because we
// link to it. Everybody who links the library asks the linker for it by name (memory/CMakeLists.txt).
extern "C" __attribute__((visibility("default"))) const bool zeropage_observes_host_memory;
const bool zeropage_observes_host_memory = zeropage::memory::observe_host_memory();

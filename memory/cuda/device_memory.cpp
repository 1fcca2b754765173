#include "memory/device_memory.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <mutex>

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/csrc/cuda/memory_snapshot.h>

#include "memory/expandable_segments.h"
#include "zeropage/check.h"

namespace zeropage::memory {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr auto kOfAllPools = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

// Called under the allocator's lock: allocates nothing there.
void track(const allocator::TraceEntry& entry) {
  const auto* data = reinterpret_cast<const void*>(entry.addr_);
  if (entry.action_ == allocator::TraceEntry::ALLOC) {
    note_device_block(data, static_cast<int64_t>(entry.size_), c10::DeviceType::CUDA);
  } else if (entry.action_ == allocator::TraceEntry::FREE_COMPLETED) {
    forget_device_block(data);
  }
}

// Called outside of the allocator's lock, when all that is left to it is to throw. total_bytes: of the device, or of the limit.
void refuse_for_want_of_memory(int64_t device, size_t asked_bytes, size_t total_bytes,
                               size_t free_bytes) {
  const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
  const int64_t reserved = stats.reserved_bytes[kOfAllPools].current;
  const int64_t cached = reserved - stats.allocated_bytes[kOfAllPools].current;
  const auto asked = static_cast<int64_t>(asked_bytes);
  const int64_t left = std::max<int64_t>(0, static_cast<int64_t>(total_bytes) - reserved);
  throw_out_of_memory({.device = c10::DeviceType::CUDA,
                       .asked_bytes = asked,
                       .free_bytes = std::min(left, static_cast<int64_t>(free_bytes)),
                       .cached_bytes = cached,
                       .advice = cached < asked || uses_expandable_segments()
                                     ? ""
                                     : "what is unused lies in pieces that are too small; with "
                                       "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in "
                                       "the environment they are joined"});
}

}  // namespace

void observe_cuda_memory() {
  static std::once_flag once;
  std::call_once(once, [] {
    prefer_expandable_segments();
    // The allocator of a device takes observers only once it is there.
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    allocator::attachAllocatorTraceTracker(&track);
    allocator::attachOutOfMemoryObserver(&refuse_for_want_of_memory);
    if (std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") != nullptr) {
      TORCH_WARN(
          "PYTORCH_NO_CUDA_MEMORY_CACHING is set: LibTorch then tells nobody of its blocks, so "
          "figures of memory on CUDA are 0 here; unset it unless you look for errors of kernels");
    }
  });
}

void limit_cuda_memory(c10::Device device, int64_t bytes, int64_t total_bytes) {
  const double fraction = static_cast<double>(bytes) / static_cast<double>(total_bytes);
  allocator::setMemoryFraction(std::min(1.0, fraction), device.index());
}

int64_t cuda_reserved_bytes(c10::Device device) {
  return allocator::getDeviceStats(device.index()).reserved_bytes[kOfAllPools].current;
}

void record_cuda_memory_history(int64_t most_events) {
  torch::cuda::_record_memory_history(/*enabled=*/true, /*record_context=*/true, most_events,
                                      /*trace_alloc_record_context=*/true);
}

void write_cuda_memory_snapshot(const std::string& path) {
  std::ofstream out(path, std::ios::binary);
  out << torch::cuda::_memory_snapshot_pickled();
  out.close();
  ZP_CHECK(out.good(), "the memory snapshot ", path,
           " cannot be written; is the folder there and writable?");
}

}  // namespace zeropage::memory

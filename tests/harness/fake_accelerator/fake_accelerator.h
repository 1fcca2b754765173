// An accelerator without hardware: LibTorch's PrivateUse1 device type ("fake:0" to "fake:7") in host
// memory, with streams that are really asynchronous. What forgets to wait for an event reads
// NaN here, as it would read garbage on a GPU.
//
// A stream is a thread with a queue. An operator gets its outputs' sizes on meta tensors, allocates
// them, and enqueues the CPU's kernel on the current stream; so results have the CPU's bits (with
// one intra-op thread). Queued work keeps no memory alive. Memory is filled with NaN when it is
// allocated and when it is freed, in its stream's order, and is never unmapped.
//
// Lifetime: all of it lives until the process ends. Threads: any; the current device and streams
// are a thread's own.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "planning/caching_allocator.h"
#include "zeropage/device.h"

namespace zeropage::testing {

inline constexpr c10::DeviceIndex kFakeDevices = 8;

// Adds the device to LibTorch, once a process. REQUIRES: no backward has run yet, since autograd
// starts its device threads with the first.
void register_fake_accelerator();

// Waits for everything that is enqueued. Before the process ends: kernels use what LibTorch then
// destroys.
void finish_fake_work();

inline c10::Device fake_device(c10::DeviceIndex index = 0) {
  return {c10::DeviceType::PrivateUse1, index};
}

// Before one task in four a stream sleeps a random time up to `longest`, from a generator of its own.
// Zero, the default: none.
void set_fake_delays(uint64_t seed, std::chrono::microseconds longest);

// What happened on all devices since the last reset.
struct FakeCounters {
  int64_t host_syncs = 0;     // the host waited: stream or event synchronised, a value read
  int64_t device_syncs = 0;   // the host waited for a whole device
  int64_t record_stream = 0;  // record_stream() calls, autograd's too
  int64_t launches = 0;  // operators, copies and collectives enqueued: one kernel each, or more
  // By copies, whole tensors or values; but for the few that an operator reads itself (nonzero).
  int64_t bytes_to_host = 0;
  int64_t not_async = 0;  // operators that the fake, unlike a GPU, had to run while the host waits
};
FakeCounters fake_counters();
// The launches by operator: "aten::copy_".
std::map<std::string, int64_t> fake_launches();
void reset_fake_counters();

// Bytes that tensors of one device hold, in blocks of 512, and what LibTorch's allocator would have from the device
// for them, since the last set_fake_segments().
struct FakeMemory {
  int64_t current_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t reserved_bytes = 0;
  int64_t peak_reserved_bytes = 0;
};
FakeMemory fake_memory(c10::DeviceIndex device);
void reset_fake_peak(c10::DeviceIndex device);

// Beyond it an allocation throws c10::OutOfMemoryError. Zero, the default: no limit.
void set_fake_memory_limit(c10::DeviceIndex device, int64_t most_bytes);

// From here on the device's allocator has its memory in segments, as LibTorch's CUDA allocator has, and keeps below
// the limit on them: beyond it an allocation throws c10::OutOfMemoryError. What was allocated before is in none.
void set_fake_segments(c10::DeviceIndex device, const planning::CachingAllocator::Options& options);

// From here on the first matrix product of a thread on a stream takes a workspace that stays, as cuBLAS's does, and
// the first one with an addend another. None, the default: those that there are go.
void set_fake_workspaces(const memory::ProductWorkspaces& sizes);

// Sees each block that is handed out (bytes: a multiple of 512) and given back, on the thread that
// does it, outside of locks. Empty: nobody. REQUIRES: set while no thread allocates.
using FakeMemoryObserver = std::function<void(bool allocated, void* ptr, size_t bytes, int device)>;
void set_fake_memory_observer(FakeMemoryObserver observer);

// Is told before an allocation beyond the limit throws, as LibTorch's CUDA allocator tells: outside of locks, and it may throw
// an error of its own. Empty: nobody.
using FakeShortageObserver =
    std::function<void(int device, size_t asked_bytes, size_t limit_bytes, size_t free_bytes)>;
void set_fake_shortage_observer(FakeShortageObserver observer);

// While it lives, the stream runs nothing that is enqueued after its construction. Whoever waits
// for the stream meanwhile, waits for ever.
class HeldStream {
 public:
  explicit HeldStream(c10::Stream stream);
  ~HeldStream();
  HeldStream(const HeldStream&) = delete;
  HeldStream& operator=(const HeldStream&) = delete;

 private:
  struct Gate;
  std::shared_ptr<Gate> gate_;
};

}  // namespace zeropage::testing

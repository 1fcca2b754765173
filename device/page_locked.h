// Page-locked host memory, and copies between it and a device beside the host.
//
//   const at::Tensor bytes = memory::page_locked(numel, {.device = device});
//   memory::start_copy(bytes, on_device);   // the host goes on
//   const memory::Event arrived = memory::Stream::current(device).record();
//
// LibTorch gives freed page-locked memory out again at once, unless it knows of a copy that is under way. It learns
// of a copy by the tensor's address or its storage's context, and knows neither for a part of a block whose storage
// is not its own. So all such
// memory of this project is owned by blocks of ours (device/detail/page_locked_block.h), and every copy beside the host is started
// here: a tensor may end while a device still reads or writes it, however it was narrowed.
//
// Lifetime: a tensor's storage keeps the memory. Memory of the device has no such owner: it belongs to the stream that it was
// allocated on.
// Threads: any; a copy is enqueued to the calling thread's current stream of the device.
// Throws c10::OutOfMemoryError or what the driver says where the host has no such memory.
#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/TensorBody.h>

#include "device/stream.h"

namespace zeropage::device {

struct PageLockedOptions {
  c10::Device device;      // that copies to and from it
  int64_t alignment = 64;  // bytes; a power of two
  // Kept as long as the tensor's storage, such as its charge to a ledger: the memory is on none by itself.
  std::shared_ptr<const void> kept = nullptr;
};

// uint8, [bytes], on the host, without values. From LibTorch's cache, which rounds up to a power of two and keeps what was freed:
// for memory that comes and goes. What stays has its exact size in a PinnedArena (device/pinned_arena.h).
at::Tensor page_locked(int64_t bytes, const PageLockedOptions& options);

// Enqueues a copy to the current stream of the device that one of the two is on, and returns. Where the host's end is not
// page-locked, LibTorch waits as it must. REQUIRES: both are contiguous, of the same dtype and sizes.
void start_copy(const at::Tensor& to, const at::Tensor& from);

// A copy on the host of what a device computes, and when it is there.
struct ArrivingCopy {
  at::Tensor values;
  Event arrived;
};
// from: on a device with streams.
ArrivingCopy start_copy_to_host(const at::Tensor& from);

// The values of `from` on that device, for what its current stream is given from here on. `from`, on the host, may change or end
// at once. For the host and the meta device: from.to(device).
at::Tensor start_copy_to_device(const at::Tensor& from, c10::Device device);

}  // namespace zeropage::device

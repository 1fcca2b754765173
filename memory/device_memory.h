// The memory of accelerators on the ledgers (zeropage/ledger.h).
//
// An accelerator's memory cannot carry a header, so blocks are kept in a table by address. LibTorch's
// caching allocator reports each block that it hands out and gets back; the bytes are those that
// were asked for. A block is charged where a host block would be: to the ledger and kind of the
// thread that allocates.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

namespace zeropage::memory {

// For code that observes an allocator. To forget a block that is not known does nothing: it was
// there before the observer.
void note_device_block(const void* data, int64_t bytes, c10::DeviceType device);
void forget_device_block(const void* data);

// Bytes of all blocks that are noted and not forgotten.
int64_t device_allocated_bytes(c10::DeviceType device);

// What an allocator says of a device that has no memory for a block.
struct DeviceShortage {
  c10::DeviceType device;
  int64_t asked_bytes = 0;
  int64_t free_bytes = 0;    // that the allocator may still take from the device
  int64_t cached_bytes = 0;  // that it has from there and that nobody uses
  std::string advice = {};   // in a line; "" for none
};

// What the calling thread's ledger holds on the device, now and at the peak, and what makes the step fit.
std::string out_of_memory_report(const DeviceShortage& shortage);
// Throws c10::OutOfMemoryError with that report. An allocator calls it before it throws its own error, which knows
// no kinds and no options. So a program that catches the error has printed nothing, and one that does not prints
// everything in one message.
[[noreturn]] void throw_out_of_memory(const DeviceShortage& shortage);

// From here on LibTorch's CUDA allocator is observed, and throws throw_out_of_memory()'s error instead of its own.
// Its segments grow from here on, unless the user chose otherwise (memory/expandable_segments.h). Once a process;
// later calls do nothing. Throws in a build
// without CUDA.
void observe_cuda_memory();
// The most that LibTorch's CUDA allocator takes from this device from here on, until the next call: an allocation
// that would need more throws as if the device had no more. Of `total_bytes` that it has.
void limit_cuda_memory(c10::Device device, int64_t bytes, int64_t total_bytes);
// Bytes that LibTorch's CUDA allocator has from the device, in use or cached.
int64_t cuda_reserved_bytes(c10::Device device);

// PyTorch's memory_viz (docs.pytorch.org/memory_viz) reads what write_cuda_memory_snapshot() writes: every
// segment and block, and the last `most_events` allocations and frees since recording began.
// Recording costs about a microsecond an allocation.
void record_cuda_memory_history(int64_t most_events = 100000);
void write_cuda_memory_snapshot(const std::string& path);

}  // namespace zeropage::memory

// Page-locked host memory of exactly the size asked for, carved into tensors.
//
//   const std::vector<memory::Take> takes{{numel, at::kFloat}, {numel, at::kBFloat16}};
//   memory::PinnedArena arena(memory::PinnedArena::bytes_for(takes), {.device = device, .cores = cores});
//   const at::Tensor state = arena.take(numel, at::kFloat);   // [numel], zeros, 64-byte aligned
//
// One mapping, rounded up to whole system pages (LibTorch's allocator of pinned memory rounds each
// block up to a power of two), first touched from the given cores. For a CUDA device it is
// registered with the driver, so copies to and from it are asynchronous; for the host nothing is
// locked: its pages stay where they are. For another accelerator it is what LibTorch's allocator for
// that one gives, wherever that lies.
// Not on a ledger: who takes a tensor charges it.
// Lifetime: tensors keep the memory; the arena may go before them. What start_copy() (device/page_locked.h) has
// begun keeps it too, until it is over.
// Threads: one at a time takes; tensors may end on any.
// Throws c10::Error when the host has less, when the driver refuses, and when it is
// exhausted.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include <ATen/core/Tensor.h>

#include "device/host_mapping.h"

namespace zeropage::device {

struct Take {
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
};

struct PinnedArenaOptions {
  // The device that copies to and from it. Default: the host, without page-locking.
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  // The cores on whose nodes it lies. Empty: the calling thread touches it, wherever that runs.
  CoreSet cores;
  HugePages huge_pages = HugePages::kAsk;
};

class PinnedArena {
 public:
  explicit PinnedArena(int64_t bytes, const PinnedArenaOptions& options = {});

  // Zeros, [numel], on the CPU.
  at::Tensor take(int64_t numel, at::ScalarType dtype);
  // What an arena needs for these, in any order.
  static int64_t bytes_for(std::span<const Take> takes);

  int64_t bytes() const { return bytes_; }
  int64_t taken_bytes() const { return taken_bytes_; }

 private:
  class Memory;

  int64_t bytes_;  // as asked for
  int64_t taken_bytes_ = 0;
  std::shared_ptr<Memory> memory_;
};

}  // namespace zeropage::device

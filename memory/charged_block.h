// A block of memory on a ledger: what an allocator keeps of each block that it hands out.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>

#include "zeropage/ledger.h"

namespace zeropage::memory {

class SurvivorScope;

// Charges the calling thread's ledger, under its kind, for as long as it lives.
// Threads: any may end it; one at a time renames.
class ChargedBlock {
 public:
  ChargedBlock(int64_t bytes, c10::DeviceType device);
  ~ChargedBlock();
  ChargedBlock(const ChargedBlock&) = delete;
  ChargedBlock& operator=(const ChargedBlock&) = delete;

  int64_t bytes() const { return bytes_; }
  // On the calling thread's ledger from here on.
  void take_over(Kind kind);

 private:
  friend class SurvivorScope;

  const int64_t bytes_;
  const c10::DeviceType device_;
  Kind kind_;
  std::shared_ptr<Ledger> ledger_;
  std::atomic<SurvivorScope*> scope_;  // that this block began in, or null
};

// What the calling thread allocates while it lives is kStaging; what outlives the scope then
// becomes `survivors`. For code of others that makes state and temporaries in one go, such as an
// optimizer's first step.
class SurvivorScope {
 public:
  explicit SurvivorScope(Kind survivors);
  ~SurvivorScope();
  SurvivorScope(const SurvivorScope&) = delete;
  SurvivorScope& operator=(const SurvivorScope&) = delete;

 private:
  friend class ChargedBlock;
  struct Blocks;

  const Kind survivors_;
  const KindScope temporaries_;
  SurvivorScope* const before_;  // the enclosing one of this thread
  const std::unique_ptr<Blocks> blocks_;
};

// LibTorch's CPU allocator, wrapped so that every block is on a ledger (zeropage/ledger.h).
//
// Installed before main() in every program that has a ledger: `c10::SetCPUAllocator` with a priority
// above the default's. Each block carries a 64-byte header in front of its data (which stays 64-byte
// aligned): size, kind, ledger. The ledger counts the bytes that were asked for, as PyTorch's
// profiler does; headers are not counted.
// Installs it; later calls do nothing.
bool observe_host_memory();

// The block that LibTorch's CPU allocator handed out, or null for memory from elsewhere (from_blob,
// a page).
ChargedBlock* host_block_of(const c10::DataPtr& data);

// While it lives, what the calling thread charges and discharges is LibTorch's host allocator's.
class HostAllocatorScope {
 public:
  HostAllocatorScope();
  ~HostAllocatorScope();
  HostAllocatorScope(const HostAllocatorScope&) = delete;
  HostAllocatorScope& operator=(const HostAllocatorScope&) = delete;

 private:
  const bool before_;
};

}  // namespace zeropage::memory

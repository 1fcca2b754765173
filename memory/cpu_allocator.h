// LibTorch's CPU allocator, wrapped so that every block is on a ledger (memory/ledger.h).
//
// Installed before main() by linking this library: `c10::SetCPUAllocator` with a priority above the
// default's. Each block carries a 64-byte header in front of its data (which stays 64-byte
// aligned): size, kind, ledger. The ledger counts the bytes that were asked for, as PyTorch's
// profiler does; headers are not counted.
#pragma once

#include <cstdint>

#include "memory/ledger.h"

namespace zeropage::memory {

// Bytes that LibTorch's CPU allocator has handed out and not got back, counted apart from any
// ledger.
int64_t host_allocated_bytes();

// Gives the operating system what is free: idle mappings and the heap's free pages. For a program
// that holds much less than before.
void return_idle_memory();

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
  Kind survivors_;
  KindScope temporaries_;
  void* before_;  // the enclosing scope's set of blocks
  void* blocks_;  // this scope's set of blocks
};

}  // namespace zeropage::memory

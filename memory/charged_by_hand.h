// Which of the ledgers' bytes LibTorch's allocator did not hand out: segments of collectives, mappings
// of others, all that somebody charged by Ledger::charge().
//
// Threads: any.
#pragma once

#include <cstdint>

namespace zeropage::memory {

// On the host, of all ledgers of this process, charged and not discharged yet.
int64_t host_bytes_charged_by_hand();

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

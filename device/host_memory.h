// What host memory this process may still take, before a run: the least of what the kernel says is
// available and what its cgroups leave.
//
// Figures of this moment: others may take what is free now. Free of torch, for `zp`. Threads: any.
// Throws std::runtime_error where /proc says nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace zeropage::device {

// The cgroup that leaves the least, of this process's and those above it.
struct CgroupMemory {
  int64_t limit_bytes = 0;
  // In use, without what the kernel gives back when memory is short (inactive file pages).
  int64_t used_bytes = 0;

  int64_t left_bytes() const { return limit_bytes > used_bytes ? limit_bytes - used_bytes : 0; }
};

struct HostMemory {
  int64_t total_bytes = 0;             // the machine's
  int64_t available_bytes = 0;         // MemAvailable: without swapping, for all processes
  std::optional<CgroupMemory> cgroup;  // none: no limit
  // RLIMIT_MEMLOCK: how much a process may lock itself (mlock); none: no limit. What CUDA
  // page-locks does not count.
  std::optional<int64_t> lockable_bytes;

  // What this process may take.
  int64_t usable_bytes() const;
};

// Where the kernel says how much memory there is. Tests give other paths.
struct HostMemoryPaths {
  std::string proc = "/proc";
  std::string cgroups = "/sys/fs/cgroup";
};

HostMemory read_host_memory(const HostMemoryPaths& paths = {});

// "needs 12.0 GiB on the host, which has 3.1 GiB: MemAvailable 3.1 GiB of 23.5 GiB, cgroup limit
// 8.00 GiB with 2.00 GiB in use". For the error of a caller, who says what to do.
std::string describe_need(int64_t needed_bytes, const HostMemory& memory);
// The part behind the colon.
std::string describe(const HostMemory& memory);

// What the kernel's files say. A line "MemAvailable:  123 kB" of /proc/meminfo, in bytes; throws if
// there is none.
int64_t meminfo_bytes(std::string_view text, std::string_view key);
// A cgroup's limit: none for "max" (version 2), and for a number above what machines have (1).
std::optional<int64_t> cgroup_limit(std::string_view text);

}  // namespace zeropage::device

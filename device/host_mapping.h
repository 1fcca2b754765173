// Host memory in one mapping of exactly the pages asked for, each on the NUMA node of the core that
// touched it first.
//
//   memory::HostMapping mapping(bytes, {.cores = machine.cores_of(node)});
//
// A page gets memory when it is written first, near the core that writes. So threads bound to the
// given cores do that in the constructor, one a core, each a contiguous part in the cores' order:
// no call that a container may forbid is needed. page_nodes.h verifies it.
// Lifetime: unmapped at the end. Threads: any. Free of torch, for `zp`.
// Throws std::invalid_argument unless bytes >= 1, and std::system_error where the system has no
// such memory or does not bind.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/topology.h"

namespace zeropage::device {

enum class HugePages : uint8_t {
  kAsk,  // of 2 MiB, where they fit whole: no byte more, and a fault for each of them only
  kNone,
};

struct HostMappingOptions {
  // The cores on whose nodes it lies. Empty: the calling thread touches it, wherever that runs.
  CoreSet cores;
  HugePages huge_pages = HugePages::kAsk;
};

class HostMapping {
 public:
  explicit HostMapping(int64_t bytes, const HostMappingOptions& options = {});
  ~HostMapping();
  HostMapping(const HostMapping&) = delete;
  HostMapping& operator=(const HostMapping&) = delete;

  // Zeros.
  std::byte* data() const { return data_; }
  // Whole system pages.
  int64_t bytes() const { return bytes_; }

 private:
  void touch_from(const CoreSet& cores) const;

  int64_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace zeropage::device

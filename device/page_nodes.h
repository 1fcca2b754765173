// On which NUMA node memory lies: a page lies where the thread ran that touched it first.
//
// Asks the kernel (move_pages(2), which moves nothing here). A page of 4 KiB or huge ones alike
// count as system pages; shared and private mappings alike.
// Free of torch, for `zp`. Threads: any. Throws std::system_error where the system does
// not tell: a container's filter may forbid the call.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace zeropage::device {

inline constexpr int kNotTouched = -1;

// The node of each system page that [address, address + bytes) touches; kNotTouched for one that
// nobody has written yet.
std::vector<int> page_nodes(const void* address, int64_t bytes);

// Bytes by node, whole pages; those of kNotTouched have no memory yet.
using BytesByNode = std::map<int, int64_t>;
BytesByNode bytes_by_node(const void* address, int64_t bytes);

// "48.0 MiB on node 0, 16.0 MiB on node 1, 4.0 KiB not touched"
std::string describe(const BytesByNode& placement);

}  // namespace zeropage::device

#include "device/page_nodes.h"

#include <algorithm>
#include <cerrno>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>

#include "zeropage/bytes.h"

namespace zeropage::device {
namespace {

// Pages a call: what is on the stack then stays small.
constexpr size_t kPagesAtOnce = 512;

}  // namespace

std::vector<int> page_nodes(const void* address, int64_t bytes) {
  std::vector<int> nodes;
  if (bytes <= 0) return nodes;
  const auto page_bytes = static_cast<uintptr_t>(memory::system_page_bytes());
  const auto begin = reinterpret_cast<uintptr_t>(address) / page_bytes * page_bytes;
  const auto end = reinterpret_cast<uintptr_t>(address) + static_cast<uintptr_t>(bytes);
  nodes.reserve((end - begin + page_bytes - 1) / page_bytes);
  for (uintptr_t page = begin; page < end;) {
    void* pages[kPagesAtOnce];
    int status[kPagesAtOnce];
    size_t count = 0;
    for (; count < kPagesAtOnce && page < end; ++count, page += page_bytes) {
      pages[count] = reinterpret_cast<void*>(page);
    }
    if (syscall(SYS_move_pages, /*pid=*/0, count, pages, /*nodes=*/nullptr, status, /*flags=*/0) !=
        0) {
      throw std::system_error(errno, std::generic_category(),
                              "the system does not tell on which NUMA node a page lies "
                              "(move_pages); a container may need CAP_SYS_NICE for it");
    }
    for (size_t index = 0; index < count; ++index) {
      nodes.push_back(status[index] < 0 ? kNotTouched : status[index]);
    }
  }
  return nodes;
}

BytesByNode bytes_by_node(const void* address, int64_t bytes) {
  BytesByNode placement;
  for (const int node : page_nodes(address, bytes)) {
    placement[node] += memory::system_page_bytes();
  }
  return placement;
}

std::string describe(const BytesByNode& placement) {
  std::string text;
  const auto add = [&](int64_t bytes, const std::string& where) {
    text += (text.empty() ? "" : ", ") + memory::format_bytes(bytes) + where;
  };
  for (const auto& [node, bytes] : placement) {
    if (node != kNotTouched) add(bytes, " on node " + std::to_string(node));
  }
  if (const auto missing = placement.find(kNotTouched); missing != placement.end()) {
    add(missing->second, " not touched");
  }
  return text.empty() ? "nothing" : text;
}

}  // namespace zeropage::device

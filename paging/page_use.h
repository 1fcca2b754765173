// The use of a page by an operator, or by a guard of the user.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace zeropage::paging {

// Training and inference have a trace each; a guard of the user has none.
enum class Pass : uint8_t { kTraining, kInference, kAside };

struct PageUse {
  size_t page = 0;
  bool writes = false;
};

inline bool contains(std::span<const PageUse> uses, size_t page) {
  return std::any_of(uses.begin(), uses.end(),
                     [&](const PageUse& use) { return use.page == page; });
}

}  // namespace zeropage::paging

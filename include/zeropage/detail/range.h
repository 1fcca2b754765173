// A stretch of elements, by their places in something flat.
#pragma once

#include <cstdint>

namespace zeropage {

// Elements [begin, end).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t numel() const { return end - begin; }
  bool empty() const { return end <= begin; }
  friend bool operator==(const Range&, const Range&) = default;
};

Range intersection(const Range& left, const Range& right);

}  // namespace zeropage

// Apart from bytes.cpp, because it is free of torch.
#include <array>
#include <cmath>
#include <cstdio>
#include <unistd.h>

#include "zeropage/bytes.h"

namespace zeropage::memory {

int64_t system_page_bytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

std::string format_bytes(int64_t bytes) {
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (std::abs(value) >= 1024.0 && unit + 1 < kByteUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  std::array<char, 32> text{};
  if (unit == 0) {
    std::snprintf(text.data(), text.size(), "%lld B", static_cast<long long>(bytes));
  } else {
    std::snprintf(text.data(), text.size(), unit == 3 ? "%.2f %ciB" : "%.1f %ciB", value,
                  kByteUnits[unit]);
  }
  return text.data();
}

}  // namespace zeropage::memory

#include "base/block_checksum.h"

#include <array>
#include <cinttypes>
#include <cstdio>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zeropage::base {

uint64_t block_checksum(const std::byte* data, int64_t bytes) {
  return XXH3_64bits(data, static_cast<size_t>(bytes));
}

std::string to_hex(uint64_t checksum) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016" PRIx64, checksum);
  return text.data();
}

}  // namespace zeropage::base

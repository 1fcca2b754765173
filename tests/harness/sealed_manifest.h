// A manifest's text with a checksum that is right, whatever it says: so that tests get past it.
#pragma once

#include <cstdio>
#include <string>

#include "state/block_checksums.h"

namespace zeropage::testing {

// text: a manifest, whose last line is replaced; or anything, to which one is added.
inline std::string sealed(std::string text) {
  static const std::string kBefore = ",\n \"crc32c_of_the_above\": \"";
  const size_t tail = text.rfind(kBefore);
  if (tail != std::string::npos) text.resize(tail);
  char digits[9];
  std::snprintf(digits, sizeof(digits), "%08x", state::crc32c(text.data(), text.size()));
  return text + kBefore + digits + "\"\n}\n";
}

}  // namespace zeropage::testing

// What zeropage/check.h needs of base/check.cpp, without the ledger that it names and that would install its allocator.
#include "zeropage/check.h"

namespace zeropage::memory {

std::string owner_prefix() {
  return "";
}

}  // namespace zeropage::memory

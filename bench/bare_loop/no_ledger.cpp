// What memory/check.h needs of memory/check.cpp, without the ledger that it names and that would install its allocator.
#include "memory/check.h"

namespace zeropage::memory {

std::string owner_prefix() {
  return "";
}

}  // namespace zeropage::memory

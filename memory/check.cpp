#include "memory/check.h"

#include "memory/ledger.h"

namespace zeropage::memory {

std::string owner_prefix() {
  const std::string owner = Ledger::current()->owner();
  return owner.empty() ? owner : "[" + owner + "] ";
}

std::string message_of(const std::exception& error) {
  if (const auto* from_c10 = dynamic_cast<const c10::Error*>(&error)) {
    return from_c10->what_without_backtrace();
  }
  return error.what();
}

}  // namespace zeropage::memory

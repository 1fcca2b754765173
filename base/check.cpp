#include "zeropage/check.h"

namespace zeropage::memory {

std::string message_of(const std::exception& error) {
  if (const auto* from_c10 = dynamic_cast<const c10::Error*>(&error)) {
    return from_c10->what_without_backtrace();
  }
  return error.what();
}

}  // namespace zeropage::memory

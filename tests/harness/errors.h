// What code under test says when it refuses.
#pragma once

#include <exception>
#include <string>

#include "zeropage/check.h"

namespace zeropage::testing {

// What `run` throws; "" if nothing.
template <typename Run>
std::string error_of(const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    return memory::message_of(error);
  }
  return "";
}

}  // namespace zeropage::testing

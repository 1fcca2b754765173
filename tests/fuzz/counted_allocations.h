// What this thread has by operator new, in any of its forms but the aligned ones. Linking it replaces
// them for the whole binary.
#pragma once

#include <cstdint>

namespace zeropage::testing {

int64_t live_allocated_bytes();

// The most at once from here on.
void reset_most_allocated_bytes();
int64_t most_allocated_bytes();

}  // namespace zeropage::testing

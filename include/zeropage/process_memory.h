// What the operating system says this process holds, in bytes. Linux only (/proc/self).
#pragma once

#include <cstdint>

namespace zeropage::memory {

// Resident set now (VmRSS).
int64_t resident_bytes();
// The highest resident set since the start or the last reset (VmHWM).
int64_t peak_resident_bytes();
// Starts a new peak from the present resident set.
void reset_peak_resident_bytes();

}  // namespace zeropage::memory

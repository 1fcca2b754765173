// Byte counts as people write them: 16_MiB in code, "16MiB" on a command line, "16.0 MiB" in a
// table. And those of this process, as the operating system counts them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace zeropage::memory {

constexpr int64_t operator""_KiB(unsigned long long count) {
  return static_cast<int64_t>(count) << 10;
}
constexpr int64_t operator""_MiB(unsigned long long count) {
  return static_cast<int64_t>(count) << 20;
}
constexpr int64_t operator""_GiB(unsigned long long count) {
  return static_cast<int64_t>(count) << 30;
}

// The units of byte counts, by powers of 1024.
inline constexpr std::string_view kByteUnits = "BKMGT";

// The size of the operating system's pages.
int64_t system_page_bytes();

// "512 B", "1.5 KiB", "97.2 MiB", "1.20 GiB".
std::string format_bytes(int64_t bytes);

// Reads a size: "4096" bytes, or a number with a unit, "64KiB", "1.5 GiB", "80GB", rounded to a whole byte. A unit is as
// makers of memory write it: "80GB" is 80 x 10^9 bytes, and "80GiB", 80 x 2^30, is 7 % more. Throws on anything else;
// on "80G" with both of them in words.
int64_t parse_bytes(std::string_view text);

// What the operating system says this process holds, in bytes. Linux only (/proc/self).
// Resident set now (VmRSS).
int64_t resident_bytes();
// The highest resident set since the start or the last reset (VmHWM).
int64_t peak_resident_bytes();
// Starts a new peak from the present resident set.
void reset_peak_resident_bytes();

}  // namespace zeropage::memory

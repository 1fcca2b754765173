#include "memory/bytes.h"

#include <cctype>
#include <charconv>
#include <cmath>

#include "memory/check.h"

namespace zeropage::memory {

int64_t parse_bytes(std::string_view text) {
  double value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string unit;
  for (const char* at = rest; at != text.data() + text.size(); ++at) {
    if (*at != ' ') unit += static_cast<char>(std::toupper(static_cast<unsigned char>(*at)));
  }
  size_t power = 0;
  bool unit_known = unit.empty() || unit == "B";
  for (size_t candidate = 1; candidate < kByteUnits.size(); ++candidate) {
    const std::string letter(1, kByteUnits[candidate]);
    if (unit == letter || unit == letter + "B" || unit == letter + "IB") {
      power = candidate;
      unit_known = true;
    }
  }
  const double bytes = std::ldexp(value, static_cast<int>(10 * power));
  ZP_CHECK(error == std::errc{} && unit_known && bytes >= 0 && bytes < 9.0e18 &&
               bytes == std::floor(bytes),
           "expected a number of bytes such as 4096, 64KiB or 1.5GiB, got \"", text, "\"");
  return static_cast<int64_t>(bytes);
}

}  // namespace zeropage::memory

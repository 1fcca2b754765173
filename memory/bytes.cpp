#include "memory/bytes.h"

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "memory/check.h"

namespace zeropage::memory {
namespace {

constexpr std::string_view kUnits = "BKMGT";

}  // namespace

std::string format_bytes(int64_t bytes) {
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (std::abs(value) >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  std::array<char, 32> text{};
  if (unit == 0) {
    std::snprintf(text.data(), text.size(), "%lld B", static_cast<long long>(bytes));
  } else {
    std::snprintf(text.data(), text.size(), unit == 3 ? "%.2f %ciB" : "%.1f %ciB", value,
                  kUnits[unit]);
  }
  return text.data();
}

int64_t parse_bytes(std::string_view text) {
  double value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string unit;
  for (const char* at = rest; at != text.data() + text.size(); ++at) {
    if (*at != ' ') unit += static_cast<char>(std::toupper(static_cast<unsigned char>(*at)));
  }
  size_t power = 0;
  bool unit_known = unit.empty() || unit == "B";
  for (size_t candidate = 1; candidate < kUnits.size(); ++candidate) {
    const std::string letter(1, kUnits[candidate]);
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

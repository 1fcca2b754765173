#include "progress/words.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>

namespace examples {
namespace {

constexpr size_t kColumns = 79;
constexpr double kLongest = 1e15;  // seconds whose count is a number of 64 bits

}  // namespace

std::string duration(double seconds) {
  if (!std::isfinite(seconds) || seconds > kLongest) return "?";
  const auto whole = seconds > 0 ? static_cast<int64_t>(seconds + 0.5) : 0;
  if (whole < 60) return std::to_string(whole) + "s";
  if (whole < 3600) return std::to_string(whole / 60) + "m " + std::to_string(whole % 60) + "s";
  return std::to_string(whole / 3600) + "h " + std::to_string(whole / 60 % 60) + "m";
}

std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  const char* const format = std::abs(value) < 1e6 ? "%.*f" : "%.*g";
  std::snprintf(text.data(), text.size(), format, digits, value);
  return text.data();
}

std::string line_of(const std::vector<std::string>& parts) {
  std::string line;
  for (const std::string& part : parts) {
    if (line.empty()) {
      line = part;
    } else if (line.size() + 2 + part.size() <= kColumns) {
      line += ", " + part;
    }
  }
  return line;
}

}  // namespace examples

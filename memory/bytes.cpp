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

int64_t parse_memory_size(std::string_view text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  std::string unit(rest, end);
  std::erase(unit, ' ');
  for (char& letter : unit)
    letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  size_t power = unit.empty() ? std::string_view::npos : kByteUnits.find(unit.front());
  const bool known = error == std::errc{} && value >= 0 && power != std::string_view::npos;
  const std::string letter = known && power > 0 ? unit.substr(0, 1) : "";
  ZP_CHECK(!known || power == 0 || unit != letter, "\"", text, "\" may be ", text, "B, which is ",
           static_cast<int64_t>(value * std::pow(1000.0, power)), " bytes, or ", text,
           "iB, which is ", static_cast<int64_t>(std::ldexp(value, static_cast<int>(10 * power))),
           " bytes; write the one that is meant");
  double bytes = -1;
  if (known && (unit == "B" || unit == letter + "B")) bytes = value * std::pow(1000.0, power);
  if (known && power > 0 && unit == letter + "IB")
    bytes = std::ldexp(value, static_cast<int>(10 * power));
  ZP_CHECK(bytes >= 0 && bytes < 9.0e18, "expected a size of memory such as 80GiB or 80GB, got \"",
           text, "\"");
  return std::llround(bytes);
}

}  // namespace zeropage::memory

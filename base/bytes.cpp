#include "zeropage/bytes.h"

#include <cctype>
#include <charconv>
#include <cmath>

#include "zeropage/check.h"

namespace zeropage::memory {

namespace {

double in_powers(double value, double base, size_t power) {
  return value * std::pow(base, static_cast<double>(power));
}

}  // namespace

int64_t parse_bytes(std::string_view text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  std::string unit(rest, end);
  std::erase(unit, ' ');
  for (char& letter : unit)
    letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  if (unit.empty()) unit = "B";
  const size_t power = kByteUnits.find(unit.front());
  double bytes = -1;
  if (error == std::errc{} && value >= 0 && power < kByteUnits.size() &&
      in_powers(value, 1024, power) < 9.0e18) {
    const std::string letter = power > 0 ? unit.substr(0, 1) : "";
    ZP_CHECK(power == 0 || unit != letter, "\"", text, "\" may be ", text, "B, which is ",
             std::llround(in_powers(value, 1000, power)), " bytes, or ", text, "iB, which is ",
             std::llround(in_powers(value, 1024, power)), " bytes; write the one that is meant");
    if (unit == letter + "B") bytes = in_powers(value, 1000, power);
    if (power > 0 && unit == letter + "IB") bytes = in_powers(value, 1024, power);
  }
  const bool is_whole = power > 0 || bytes == std::floor(bytes);
  ZP_CHECK(bytes >= 0 && is_whole, "expected a size such as 4096, 64KiB, 80GiB or 80GB, got \"",
           text, "\"");
  return std::llround(bytes);
}

}  // namespace zeropage::memory

#include "text/detail/byte_alphabet.h"

#include <array>
#include <cstdint>

#include "text/detail/utf8.h"

namespace zeropage::text::detail {
namespace {

constexpr char32_t kFirstStandIn = 0x100;

constexpr bool stands_for_itself(char32_t byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xFF && byte != 0xAD);
}

// The bytes behind U+0100, U+0101 and so on.
constexpr std::array<char, 68> kStandIns = [] {
  std::array<char, 68> bytes{};
  size_t count = 0;
  for (char32_t byte = 0; byte < 0x100; ++byte) {
    if (!stands_for_itself(byte)) bytes[count++] = static_cast<char>(byte);
  }
  return bytes;
}();

}  // namespace

std::optional<std::string> bytes_of_alphabet(std::string_view text) {
  if (characters_at_beginning(text) != text.size()) return std::nullopt;
  std::string bytes;
  while (!text.empty()) {
    const char32_t character = take_character(text);
    if (character < kFirstStandIn && stands_for_itself(character)) {
      bytes += static_cast<char>(character);
    } else if (character >= kFirstStandIn && character < kFirstStandIn + kStandIns.size()) {
      bytes += kStandIns[character - kFirstStandIn];
    } else {
      return std::nullopt;
    }
  }
  return bytes;
}

}  // namespace zeropage::text::detail

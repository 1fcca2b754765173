#include "text/detail/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace zeropage::text::detail {
namespace {

constexpr size_t kMostBytes = 4;

// What the first byte says of a character: its length, and the bounds of its second byte.
struct Lead {
  size_t bytes = 0;  // 0: no character begins so
  uint8_t least = 0x80;
  uint8_t most = 0xBF;
};

Lead lead_of(uint8_t byte) {
  if (byte < 0x80) return {1};
  if (byte < 0xC2) return {};
  if (byte < 0xE0) return {2};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};  // no surrogates
  if (byte < 0xF0) return {3};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4};
  if (byte == 0xF4) return {4, 0x80, 0x8F};  // up to U+10FFFF
  return {};
}

uint8_t byte_at(std::string_view text, size_t at) {
  return static_cast<uint8_t>(text[at]);
}

// Whether the bytes of `text`, of which there may be too few, begin as a character does.
bool may_begin(std::string_view text, const Lead& lead) {
  for (size_t i = 1; i < std::min(text.size(), lead.bytes); ++i) {
    const uint8_t byte = byte_at(text, i);
    if (byte < (i == 1 ? lead.least : 0x80) || byte > (i == 1 ? lead.most : 0xBF)) return false;
  }
  return lead.bytes > 0;
}

}  // namespace

size_t characters_at_beginning(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    uint64_t eight = 0;
    while (at + sizeof(eight) <= text.size()) {
      std::memcpy(&eight, text.data() + at, sizeof(eight));
      if ((eight & 0x8080808080808080U) != 0) break;
      at += sizeof(eight);
    }
    if (at == text.size()) break;
    const Lead lead = lead_of(byte_at(text, at));
    if (lead.bytes > text.size() - at || !may_begin(text.substr(at), lead)) break;
    at += lead.bytes;
  }
  return at;
}

size_t unfinished_at_end(std::string_view text) {
  for (size_t count = 1; count < kMostBytes && count <= text.size(); ++count) {
    const std::string_view end = text.substr(text.size() - count);
    const uint8_t first = byte_at(end, 0);
    if (first >= 0x80 && first <= 0xBF) continue;
    const Lead lead = lead_of(first);
    return lead.bytes > count && may_begin(end, lead) ? count : 0;
  }
  return 0;
}

void append_character(std::string& text, char32_t character) {
  const auto tail = [&](int shift) {
    text += static_cast<char>(0x80 | (character >> shift & 0x3F));
  };
  if (character < 0x80) {
    text += static_cast<char>(character);
  } else if (character < 0x800) {
    text += static_cast<char>(0xC0 | character >> 6);
    tail(0);
  } else if (character < 0x10000) {
    text += static_cast<char>(0xE0 | character >> 12);
    tail(6);
    tail(0);
  } else {
    text += static_cast<char>(0xF0 | character >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

char32_t take_character(std::string_view& text) {
  const size_t bytes = lead_of(byte_at(text, 0)).bytes;
  char32_t character = byte_at(text, 0);
  if (bytes > 1) character &= 0xFFU >> (bytes + 1);
  for (size_t i = 1; i < bytes; ++i) character = character << 6 | (byte_at(text, i) & 0x3FU);
  text.remove_prefix(bytes);
  return character;
}

}  // namespace zeropage::text::detail

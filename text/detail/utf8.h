// UTF-8: which bytes are characters (Unicode 15, table 3-7).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace zeropage::text::detail {

// How many bytes the characters at the beginning of `text` take, up to the first byte that is none.
size_t characters_at_beginning(std::string_view text);

// How many bytes at the end of `text` may begin a character that is not whole yet: 0 to 3.
size_t unfinished_at_end(std::string_view text);

// Appends a character, up to U+10FFFF and no surrogate.
void append_character(std::string& text, char32_t character);

// The first character of valid, non-empty text, which is shortened by it.
char32_t take_character(std::string_view& text);

}  // namespace zeropage::text::detail

// How GPT-2's files write bytes as characters: those of Latin-1 that can be seen stand for themselves, and the other
// 68 are U+0100 and on, in order.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace zeropage::text::detail {

// The bytes that `text` stands for; nothing if a character of it stands for no byte, or it is no UTF-8.
std::optional<std::string> bytes_of_alphabet(std::string_view text);

}  // namespace zeropage::text::detail

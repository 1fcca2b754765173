// Unicode's normal form C, which some tokenizers want.
#pragma once

#include <string>
#include <string_view>

namespace zeropage::text::detail {

// Characters are composed; bytes that are no UTF-8 stay as they are.
std::string composed(std::string_view text);

}  // namespace zeropage::text::detail

#include "text/detail/normal_form.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utf8proc.h>

#include "text/detail/utf8.h"

namespace zeropage::text::detail {
namespace {

// Characters below U+0300, whose first bytes are below 0xCC, are composed.
constexpr uint8_t kFirstThatMayChange = 0xCC;

}  // namespace

std::string composed(std::string_view text) {
  const auto may_change = [](char byte) {
    return static_cast<uint8_t>(byte) >= kFirstThatMayChange;
  };
  if (std::none_of(text.begin(), text.end(), may_change)) return std::string(text);
  std::string all;
  while (!text.empty()) {
    const size_t valid = characters_at_beginning(text);
    utf8proc_uint8_t* made = nullptr;
    const utf8proc_ssize_t bytes =
        utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                     static_cast<utf8proc_ssize_t>(valid), &made,
                     static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> held(made, &std::free);
    if (bytes < 0) throw std::bad_alloc();
    all.append(reinterpret_cast<const char*>(made), static_cast<size_t>(bytes));
    text.remove_prefix(valid);
    if (text.empty()) break;
    all += text[0];
    text.remove_prefix(1);
  }
  return all;
}

}  // namespace zeropage::text::detail

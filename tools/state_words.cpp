#include "tools/state_words.h"

#include <algorithm>
#include <cstdio>

namespace zeropage::tools {
namespace {

using nlohmann::json;

constexpr size_t kMostBytes = 100;

std::string dumped(const json& value, int indent) {
  return value.dump(indent, ' ', indent < 0, json::error_handler_t::replace);
}

}  // namespace

std::string printable(const std::string& name) {
  const bool plain = std::all_of(name.begin(), name.end(), [](char character) {
    return static_cast<unsigned char>(character) >= 0x20 && character != 0x7f;
  });
  return plain ? name : dumped(name, -1);
}

std::string text_of(const json& value) {
  return value.get<std::string>();
}

std::string in_quotes(const std::string& text) {
  return "\"" + text + "\"";
}

std::string in_short(const json& value) {
  if (value.is_null()) return "nothing";
  std::string text = dumped(value, -1);
  return text.size() <= kMostBytes ? text : text.substr(0, kMostBytes - 3) + "...";
}

void print_json(const json& value) {
  std::printf("%s\n", dumped(value, 2).c_str());
}

}  // namespace zeropage::tools

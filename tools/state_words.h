// What a state has, shown on a terminal.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace zeropage::tools {

// A name as it is, or in JSON's escapes where a terminal would obey it.
std::string printable(const std::string& name);

// What a value that is a string says.
std::string text_of(const nlohmann::json& value);

// In quotation marks.
std::string in_quotes(const std::string& text);

// A value in JSON, cut where it is long; "nothing" for null.
std::string in_short(const nlohmann::json& value);

// Whole, on stdout; bytes that are no UTF-8 become U+FFFD.
void print_json(const nlohmann::json& value);

}  // namespace zeropage::tools

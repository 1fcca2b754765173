// A JSON file's content.
#pragma once

#include <filesystem>

#include <nlohmann/json.hpp>

namespace zeropage::text::detail {

// Throws TextError where the file cannot be read or is no JSON, with the byte.
nlohmann::json read_json(const std::filesystem::path& file);

}  // namespace zeropage::text::detail

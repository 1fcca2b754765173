// What a state has, and whether it is as it was written: `zp state inspect` and `verify`.
#pragma once

#include <filesystem>
#include <vector>

#include <nlohmann/json.hpp>

namespace zeropage::tools {

// {"directory", "step", "tied": {name: stored under},
//  "files": [{"name", "bytes", "numel", "numel_by_dtype": {"F32": n}, "tensors": [{"name", "dtype", "shape", "bytes"}]}],
//  "content": of the manifest}
// Sizes in bytes. Reads the manifest and the headers. Throws state::StateError.
nlohmann::json contents_of(const std::filesystem::path& state);
enum class TensorTable : uint8_t { kShown, kLeftOut };
void print_contents(const nlohmann::json& contents, TensorTable table);

// {"whole": bool, "bytes", "seconds", "bytes_per_second",
//  "states": [{"directory", "whole", "bytes", "seconds", "damage": [{"file", "offset", "words"}]}]}
// Reads every block of every file; bytes are those that could be read.
nlohmann::json verify(const std::vector<std::filesystem::path>& states);
void print_verification(const nlohmann::json& verification);

}  // namespace zeropage::tools

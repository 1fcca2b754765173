// Two states, compared: what their manifests say and what their tensors have. `zp state diff`.
#pragma once

#include <filesystem>

#include <nlohmann/json.hpp>

namespace zeropage::tools {

// {"same": bool, "a": directory, "b": directory,
//  "manifest": [{"path", "a", "b"}],           step, tied names, and what else is kept; null: not there
//  "files": [{"file", "same_tensors", "only_in_a": [name], "only_in_b": [name],
//             "unlike": [{"name", "a": {"dtype", "shape"}, "b": ...}],
//             "different": [{"name", "dtype", "shape", "numel", "different_numel", "first_index",
//                            "largest_difference", "without_distance_numel"}]}]}
// largest_difference is null where it is infinite. Reads both once, in memory for two blocks each.
// Throws state::StateError.
nlohmann::json difference_of(const std::filesystem::path& a, const std::filesystem::path& b);

void print_difference(const nlohmann::json& difference);

}  // namespace zeropage::tools

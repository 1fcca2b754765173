// A file's bytes, of a gzipped one those that it stands for.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace zeropage::data::detail {

// More than any data set of the recipes. A gzipped file of zeros grows a thousandfold.
inline constexpr int64_t kMostFileBytes = int64_t{4} << 30;

// Throws c10::Error that names the file where it is missing, cannot be read, is damaged (gzip has a
// checksum), or has more than `most_bytes`.
std::string read_file_bytes(const std::filesystem::path& file, int64_t most_bytes = kMostFileBytes);

}  // namespace zeropage::data::detail

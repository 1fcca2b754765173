// Numbers in LibTorch's archives. Reading throws c10::Error, with `owner` and the key, on a value
// that is missing or of another type.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/serialize/archive.h>

namespace zeropage::accumulate::detail {

double read_double(torch::serialize::InputArchive& archive, const std::string& owner,
                   const std::string& key);
// A counter: at least 0.
int64_t read_count(torch::serialize::InputArchive& archive, const std::string& owner,
                   const std::string& key);
std::vector<double> read_doubles(torch::serialize::InputArchive& archive, const std::string& owner,
                                 const std::string& key);

}  // namespace zeropage::accumulate::detail

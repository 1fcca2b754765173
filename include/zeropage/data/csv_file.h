// A table of numbers as comma-separated text, gzipped or not.
//
// Threads: any. Throws c10::Error: which file, line and column, what was expected, what is there.
#pragma once

#include <filesystem>

#include <ATen/core/TensorBody.h>

namespace zeropage::data {

// [rows, columns] fp32. Every line has as many numbers as the first; empty lines are passed over. There is
// no line of names.
at::Tensor read_csv(const std::filesystem::path& file);

}  // namespace zeropage::data

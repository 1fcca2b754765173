// Tensors in the IDX format of MNIST (LeCun), gzipped or not.
//
//   at::Tensor images = data::read_idx("train-images-idx3-ubyte.gz");  // [60000, 28, 28] uint8
//
// Threads: any. Throws c10::Error: which file, what was expected, what is there.
#pragma once

#include <filesystem>

#include <ATen/core/TensorBody.h>

namespace zeropage::data {

// A tensor of the file's sizes; uint8, int8, int16, int32, float or double.
at::Tensor read_idx(const std::filesystem::path& file);

}  // namespace zeropage::data

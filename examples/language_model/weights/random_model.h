// A model of a shape, with random weights, as files: to try what a model of that size costs before one has its weights.
//
//   write_random_model("mistral-7b", read_config("config.json"), {.dtype = torch::kBFloat16});
#pragma once

#include <cstdint>
#include <filesystem>

#include <torch/torch.h>

#include "language_model/model/config.h"

namespace language_model {

struct RandomModelOptions {
  torch::ScalarType dtype = torch::kFloat32;  // or bf16 or half
  uint64_t seed = 1;
  // A file ends before the tensor with which it would have more bytes; a larger tensor is a file by itself.
  int64_t file_bytes = int64_t{4} << 30;
};

struct RandomModel {
  int64_t parameters = 0;
  int64_t bytes = 0;  // of all tensors
  int64_t files = 0;
};

// Writes config.json, and model.safetensors or, where that would be too large, an index and several files. Matrices are drawn with
// first_deviation(), norms are one and biases zero. Memory: the largest tensor.
// folder: made where it is not there. Throws std::runtime_error where it has a model already.
RandomModel write_random_model(const std::filesystem::path& folder, const ModelConfig& config,
                               const RandomModelOptions& options = {});

}  // namespace language_model

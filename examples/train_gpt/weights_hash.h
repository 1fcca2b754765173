// One number for all weights: what "the same bits" is checked by.
#pragma once

#include <string>

#include <torch/torch.h>

namespace train_gpt {

// SHA-256 of the weights as little-endian fp32, in named_parameters() order, in hexadecimal.
std::string weights_sha256(const torch::OrderedDict<std::string, torch::Tensor>& parameters);

}  // namespace train_gpt

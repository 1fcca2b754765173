// Layers that all have one weight of the same size, for tests that count bytes.
#pragma once

#include <torch/torch.h>

namespace zeropage::testing {

// count weights of width x width, without biases. [batch, width] -> [batch, width]
inline torch::nn::Sequential square_layers(int64_t count, int64_t width) {
  torch::nn::Sequential layers;
  for (int64_t layer = 0; layer < count; ++layer) {
    layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
  return layers;
}

}  // namespace zeropage::testing

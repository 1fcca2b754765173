// What ranks give to a reduction in tests, and what must come out.
#pragma once

#include <torch/torch.h>

namespace zeropage::testing {

// What rank r contributes; the same on whichever rank asks.
inline torch::Tensor contribution(int rank, int64_t numel,
                                  torch::ScalarType dtype = torch::kFloat32) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 + rank));
  return torch::randn({numel}, generator).to(dtype);
}

// In fp32, not divided.
inline torch::Tensor tree_sum(int low, int high, int64_t numel,
                              torch::ScalarType dtype = torch::kFloat32) {
  if (high - low == 1) return contribution(low, numel, dtype).to(torch::kFloat32);
  int half = 1;
  while (half * 2 < high - low) half *= 2;
  return tree_sum(low, low + half, numel, dtype) + tree_sum(low + half, high, numel, dtype);
}

}  // namespace zeropage::testing

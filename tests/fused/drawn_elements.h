// Elements of any dtype that the fused operators' loops and kernels take. Free of torch.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "fused/rows.h"

namespace zeropage::testing {

// Normal with a deviation of 2.
template <typename T>
std::vector<T> drawn_elements(int64_t numel, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<T> values(static_cast<size_t>(numel));
  for (T& value : values) fused::set(value, normal(generator));
  return values;
}

}  // namespace zeropage::testing

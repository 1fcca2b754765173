// What elements of tensors are as numbers, and how far two runs of elements are apart.
#pragma once

#include <cstdint>
#include <optional>

#include "zeropage/saved_state.h"

namespace zeropage::tools {

// The value of the element there. A long double holds every dtype without rounding.
long double value_of(state::Dtype dtype, const char* element);

struct ElementDifference {
  uint64_t numel = 0;                   // whose bits differ
  std::optional<uint64_t> first;        // of them, its index
  long double largest = 0;              // |a - b| of those where it is a number, or infinite
  uint64_t without_distance_numel = 0;  // where it is none: a NaN, or the same infinity

  // Elements [index, index + numel) of both.
  void add(state::Dtype dtype, uint64_t index, uint64_t numel, const char* a, const char* b);
};

}  // namespace zeropage::tools

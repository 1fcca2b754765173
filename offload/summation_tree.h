// What is summed of a block of elements, on the host and in CUDA kernels alike. offload/flat_norm.h
// describes the tree. Free of torch and of CUDA.
#pragma once

#include <cstdint>
#include <variant>

#include "offload/low_precision.h"

namespace zeropage::offload {

// Elements whose squares are one sum.
inline constexpr int kBlockNumel = 256;

// The first of them, of a precision that has norms.
using FlatElements =
    std::variant<const double*, const float*, const BFloat16Bits*, const HalfBits*>;

template <typename Integer>
ZEROPAGE_ELEMENT Integer parts_of(Integer numel, Integer part_numel) {
  return (numel + part_numel - 1) / part_numel;
}

ZEROPAGE_ELEMENT double square_of(double value) {
  return rounded::multiply(value, value);
}

// Exact: 24 bits of mantissa squared are 48.
template <typename Element>
ZEROPAGE_ELEMENT double square_of(Element value) {
  return square_of(static_cast<double>(to_float(value)));
}

}  // namespace zeropage::offload

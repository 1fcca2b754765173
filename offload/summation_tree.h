// The shape of the trees in which fp64 terms are summed, on the host and in CUDA kernels alike.
// offload/flat_norm.h describes them. Free of torch and of CUDA.
#pragma once

#include <cstdint>

#include "offload/rounded.h"

namespace zeropage::offload {

// Elements whose squares are one sum.
inline constexpr int kBlockNumel = 256;

// Terms that one call adds to one. A power of two, so that the tree over chunks of chunks is the
// tree over all terms.
inline constexpr int kChunkNumel = 2048;

template <typename Integer>
ZEROPAGE_ELEMENT Integer parts_of(Integer numel, Integer part_numel) {
  return (numel + part_numel - 1) / part_numel;
}

// Exact of every gradient: 24 bits of mantissa squared are 48.
ZEROPAGE_ELEMENT double square_of(float value) {
  const auto wide = static_cast<double>(value);
  return rounded::multiply(wide, wide);
}

}  // namespace zeropage::offload

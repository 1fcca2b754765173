// How the states of an optimizer lie in memory. Free of torch and of CUDA.
#pragma once

#include <cstdint>

namespace zeropage {

enum class StateFormat : uint8_t {
  kFp32,  // 4 bytes an element
  kBf16,  // 2 bytes an element: rounded up or down at random (stochastic_rounding.h)
  // 1 byte an element and an fp32 scale a block of 256: quantised block by block
  // (quantisation_map.h).
  k8Bit,
};

inline constexpr int64_t kStateBlockNumel = 256;

// Blocks of which a stretch has elements; first_in_block: of the first one, the stretch's first.
constexpr int64_t blocks_of(int64_t first_in_block, int64_t numel) {
  return numel == 0 ? 0 : (first_in_block + numel - 1) / kStateBlockNumel + 1;
}

// What a state of the stretch takes.
constexpr int64_t state_bytes(StateFormat format, int64_t first_in_block, int64_t numel) {
  switch (format) {
    case StateFormat::kFp32:
      return numel * 4;
    case StateFormat::kBf16:
      return numel * 2;
    case StateFormat::k8Bit:
      break;
  }
  return numel + blocks_of(first_in_block, numel) * 4;
}

}  // namespace zeropage

// The types of GGUF tensors: names, sizes of blocks, and how a block becomes numbers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zeropage/text/gguf_file.h"

namespace zeropage::text::detail {

struct GgufBlock {
  const char* name;
  uint32_t numel;  // a block's elements
  uint32_t bytes;  // a block's bytes
  // Writes the elements of `count` blocks; null for a type that is not read here.
  void (*unpack)(const char* blocks, size_t count, float* out);
};

// Most elements that a block of any type has.
inline constexpr uint32_t kMostBlockNumel = 256;

// Null for a type that the format does not have.
const GgufBlock* block_of(GgufType type);

}  // namespace zeropage::text::detail

#include "checkpointing/detail/compression.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "base/exact.h"

namespace zeropage::checkpointing::detail {
namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kMost = 127;
// Elements that are worked on at once: temporaries in fp32 stay below 16 MiB.
constexpr int64_t kChunk = 4096 * kBlock;
constexpr int64_t kScaleBytes = sizeof(float);

// The parts of an 8-bit form: first the scales, then the elements.
struct Parts {
  Parts(const at::Tensor& encoded, int64_t numel) {
    const int64_t scale_bytes = base::div_ceil(numel, kBlock) * kScaleBytes;
    scales = encoded.narrow(0, 0, scale_bytes).view(at::kFloat);
    elements = encoded.narrow(0, scale_bytes, numel).view(at::kChar);
  }
  at::Tensor scales;    // [blocks]
  at::Tensor elements;  // [numel]
};

// apply(first element, blocks, elements of a block), for chunks of whole blocks and a last short one
template <typename Apply>
void for_each_chunk(int64_t numel, const Apply& apply) {
  const int64_t whole = numel / kBlock * kBlock;
  for (int64_t first = 0; first < whole; first += kChunk) {
    apply(first, std::min(kChunk, whole - first) / kBlock, kBlock);
  }
  if (whole < numel) apply(whole, 1, numel - whole);
}

}  // namespace

bool compresses(Compression compression, at::ScalarType dtype) {
  if (!at::isFloatingType(dtype) || at::isReducedFloatingType(dtype)) {
    const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
    return is_half && compression == Compression::k8Bit;
  }
  return compression != Compression::kNone;
}

Encoded encoded_form(Compression compression, at::ScalarType dtype, int64_t numel) {
  if (!compresses(compression, dtype)) return {dtype, numel};
  if (compression == Compression::kBf16) return {at::kBFloat16, numel};
  return {at::kByte, base::div_ceil(numel, kBlock) * kScaleBytes + numel};
}

void encode(Compression compression, const at::Tensor& flat, const at::Tensor& encoded) {
  if (compression != Compression::k8Bit || !compresses(compression, flat.scalar_type())) {
    encoded.copy_(flat);
    return;
  }
  const Parts parts(encoded, flat.numel());
  for_each_chunk(flat.numel(), [&](int64_t first, int64_t blocks, int64_t size) {
    const auto chunk = flat.narrow(0, first, blocks * size).view({blocks, size}).to(at::kFloat);
    const auto scales = parts.scales.narrow(0, first / kBlock, blocks);
    scales.copy_(chunk.abs().amax(1).div_(kMost));
    // A block of zeros has no scale, and needs none.
    const auto divisors = scales.masked_fill(scales == 0, 1).unsqueeze(1);
    const auto rounded = chunk.div(divisors).round_().nan_to_num_(kMost).clamp_(-kMost, kMost);
    parts.elements.narrow(0, first, blocks * size).view({blocks, size}).copy_(rounded);
  });
}

void decode(Compression compression, const at::Tensor& encoded, const at::Tensor& flat) {
  if (compression != Compression::k8Bit || !compresses(compression, flat.scalar_type())) {
    flat.copy_(encoded);
    return;
  }
  const Parts parts(encoded, flat.numel());
  for_each_chunk(flat.numel(), [&](int64_t first, int64_t blocks, int64_t size) {
    const auto chunk = parts.elements.narrow(0, first, blocks * size).view({blocks, size});
    const auto scales = parts.scales.narrow(0, first / kBlock, blocks).unsqueeze(1);
    flat.narrow(0, first, blocks * size).view({blocks, size}).copy_(chunk.to(at::kFloat) * scales);
  });
}

}  // namespace zeropage::checkpointing::detail

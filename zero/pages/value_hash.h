// Hashes of bytes on the host, to compare them over ranks, and what errors say of a tensor's values. Those of tensors:
// optim/bit_hashes.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <ATen/core/TensorBody.h>

namespace zeropage::zero {

uint64_t hash_of_bytes(const void* bytes, size_t count);

// The hash of one line of the cache in 64, another one in each round.
uint64_t sampled_hash(const void* bytes, size_t count, uint64_t round);

// "norm 1.25 (hash 8f...)". flat: 1-D, contiguous, with values.
std::string words_of_values(const at::Tensor& flat);

}  // namespace zeropage::zero

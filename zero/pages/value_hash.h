// Hashes of tensors' bits, to compare them over ranks.
//
// On the host a hash of 64 bits, at the speed of memory. On an accelerator the sum of the elements' bits as whole
// numbers, in a launch a tensor and one copy to the host: it misses a change of their order. Each rank of a world has
// the same kind of device, so compares alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

namespace zeropage::zero {

uint64_t hash_of_bytes(const void* bytes, size_t count);

// The hash of one line of the cache in 64, another one in each round.
uint64_t sampled_hash(const void* bytes, size_t count, uint64_t round);

// "norm 1.25 (hash 8f...)". flat: as below.
std::string words_of_values(const at::Tensor& flat);

// By tensor. flat: 1-D, contiguous, all on one device, with values. The host waits for what an accelerator was given.
std::vector<uint64_t> hashes_of_values(const std::vector<at::Tensor>& flat);

}  // namespace zeropage::zero

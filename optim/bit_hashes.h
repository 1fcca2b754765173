// Hashes of tensors' bits, one a tensor, to compare them over ranks.
//
// A hash is of 64 bits and of the tensor's bits alone. Two tensors of the same bytes have the same one on every rank with the
// same kind of device; two that differ have the same one with about the chance of 2^-64. On the host it is XXH3, on the loops'
// threads, at the speed of memory. On CUDA all tensors take one launch, which reads each once. Other accelerators add up each
// tensor's elements as whole numbers, a launch a tensor, which misses a change of their order.
//
// The host waits for what an accelerator was given before. Threads: any.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace zeropage::optim {

// By tensor. flat: 1-D, contiguous, with values, on the host or on one accelerator each. No tensors have no hashes.
std::vector<uint64_t> bit_hashes(const std::vector<at::Tensor>& flat);

}  // namespace zeropage::optim

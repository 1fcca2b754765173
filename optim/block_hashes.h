// Hashes of a flat tensor's blocks, which tell where it was written to between two moments, also by
// what leaves no trace in version counters.
//
// A hash is of 64 bits and of the block's bits alone. Two different blocks have the same one with
// about the chance of 2^-64. Each kind of device has hashes of its own, so compare those of one.
// Reads the input once; the hashes take 8 bytes for 256 elements.
//
// On CUDA the work is queued on the current stream; other accelerators do it by LibTorch's operators,
// in a temporary of 2 to 4 times the input. Threads: any.
// Throws c10::Error on other tensors.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace zeropage::optim {

inline constexpr int64_t kHashedNumel = 256;

// flat: fp32, bf16 or fp16, contiguous, of whole blocks. int64 [numel / 256], on its device.
at::Tensor block_hashes(const at::Tensor& flat);

}  // namespace zeropage::optim

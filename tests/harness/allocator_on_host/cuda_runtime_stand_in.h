// A CUDA runtime without a device, for LibTorch's CUDA caching allocator (libc10_cuda.so): its memory is addresses
// that nobody may use, and its streams and events do nothing. So the allocator itself runs where there is no GPU.
//
// A program that links this defines CUDA's functions, and the loader takes them before those of libcudart. A function that the
// allocator does not need is missing here, and libcudart's own answers that there is no driver.
//
// Threads: one.
#pragma once

#include <cstddef>

namespace zeropage::testing {

// The device's memory, which cudaMemGetInfo() and the device's properties tell.
inline constexpr size_t kBytesOfStandIn = size_t{80} << 30;

// Whether the device can map memory by itself, as expandable segments need; it can by default.
void let_stand_in_map_memory(bool can_map);

}  // namespace zeropage::testing

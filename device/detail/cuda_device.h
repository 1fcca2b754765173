// What CUDA says of its devices. A build without CUDA has none: device/no_cuda.cpp.
#pragma once

#include <cstdint>
#include <string>

namespace zeropage::device::cuda {

int device_count();
// Why there is no device to use, and what to do; "" where there is one.
std::string why_none();

// index: below device_count().
std::string uuid(int index);
std::string name(int index);

// Page-locks it, for all devices: copies to and from it are asynchronous.
void register_host_memory(void* data, int64_t bytes);
void unregister_host_memory(void* data) noexcept;

}  // namespace zeropage::device::cuda

// What CUDA says of its devices. A build without CUDA has none: memory/no_cuda.cpp.
#pragma once

#include <string>

namespace zeropage::memory::cuda {

int device_count();
// Why there is no device to use, and what to do; "" where there is one.
std::string why_none();

// index: below device_count().
std::string uuid(int index);
std::string name(int index);

}  // namespace zeropage::memory::cuda

// Ranges for NVIDIA's tools. Nothing in a build without CUDA: memory/no_cuda.cpp.
#pragma once

namespace zeropage::device::nvtx {

void push(const char* name);
void pop();

}  // namespace zeropage::device::nvtx

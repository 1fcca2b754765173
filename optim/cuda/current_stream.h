// The stream that LibTorch's operators of this thread run on.
#pragma once

#include <c10/core/Device.h>

namespace zeropage::optim::cuda {

// The current stream of a CUDA device, as a cudaStream_t.
void* current_stream(const c10::Device& device);

}  // namespace zeropage::optim::cuda

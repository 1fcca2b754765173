// The fused steps as CUDA kernels. In builds without CUDA no_cuda.cpp has these functions, and all
// but is_built() throw. Free of torch and of CUDA.
//
// `stream` is a cudaStream_t of the current device; the kernels are queued there, and what the
// pointers point to must live until they ran. Throws std::runtime_error in words when a launch
// fails.
#pragma once

#include "offload/flat_stretch.h"
#include "offload/update_rule.h"

namespace zeropage::offload::cuda {

bool is_built();

void fused_step(const UpdateRule& rule, const FlatStretch& stretch, void* stream);

}  // namespace zeropage::offload::cuda

// The fused steps of stretches with smaller states or split values, as CUDA kernels; see
// fused_step.h there for streams, errors and builds without CUDA. Free of torch and of CUDA.
#pragma once

#include "optim/packed_stretch.h"
#include "optim/update_rule.h"

namespace zeropage::optim::cuda {

void packed_step(const UpdateRule& rule, const PackedStretch& stretch, void* stream);

}  // namespace zeropage::optim::cuda

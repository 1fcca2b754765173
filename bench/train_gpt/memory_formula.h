// What a rank holds from step to step, and its gradients, computed from the flags alone.
#pragma once

#include <cstdint>
#include <string>

#include "bench/train_gpt/flags.h"
#include "zero/plan/byte_plan.h"

namespace train_gpt {

// zeropage::zero::formula_bytes() for the flags. With --offload-bytes as if all left.
zeropage::memory::TierBytes memory_formula(const Flags& flags, int64_t parameters, int world_size);

// zeropage::zero::formula_gradient_bytes() for them.
int64_t gradient_formula(const Flags& flags, int64_t parameters, int world_size);

// State tensors of a parameter's size that the optimizer keeps, in the mean over the model's parameters.
double state_tensors(const Flags& flags);

}  // namespace train_gpt

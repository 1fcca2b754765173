// The fused steps as loops: the portable reference, and what runs on the host. Free of torch.
#pragma once

#include <cstdint>

#include "optim/cpu/instructions.h"
#include "optim/flat_stretch.h"
#include "optim/update_rule.h"

namespace zeropage::optim::cpu {

// Updates elements [begin, end) of the stretch, unless its found_inf is set, and zeroes their
// gradient in any case if that is wanted.
void fused_step(const UpdateRule& rule, const FlatStretch& stretch, int64_t begin, int64_t end,
                Instructions instructions = Instructions::kAvx512);

// What fused_step() does first where the stretch adopts its copy; fp32 values.
void adopt_copy(const FlatStretch& stretch, int64_t begin, int64_t end,
                Instructions instructions = Instructions::kAvx512);

}  // namespace zeropage::optim::cpu

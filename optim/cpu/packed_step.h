// The fused steps of stretches with smaller states or split values: a tile of them becomes fp32 in
// the first-level cache, is stepped there (cpu/fused_step) and packed again. Free of torch.
#pragma once

#include "optim/cpu/instructions.h"
#include "optim/packed_stretch.h"
#include "optim/update_rule.h"

namespace zeropage::optim::cpu {

// Updates elements [begin, end) of the stretch as fused_step() does. With 8-bit states begin
// is the first of its block, or the stretch's first, and end is where a block or the stretch ends.
void packed_step(const UpdateRule& rule, const PackedStretch& stretch, int64_t begin, int64_t end,
                 Instructions instructions = Instructions::kAvx512);

}  // namespace zeropage::optim::cpu

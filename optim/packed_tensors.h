// The tensors of a stretch with smaller states or split values: made, checked in words, and as
// pointers.
#pragma once

#include <ATen/core/Tensor.h>

#include "optim/packed_stretch.h"
#include "optim/stretch.h"
#include "zeropage/detail/state_format.h"

namespace zeropage::optim {

// The name in errors: the function that users call.
inline constexpr const char* kFusedStep = "fused_step";

// The format that the states' dtype has; throws for a dtype that no format has. kFp32 where there are no states.
StateFormat format_of(const Stretch& stretch);

// Whether it takes packed_step().
bool is_packed(const Stretch& stretch);

// Throws unless scales, remainders and place are as the format wants them.
void check_packed(const Stretch& stretch, StateFormat format);

// flat: of the stretch, without values and states where those are packed.
PackedStretch packed_of(const Stretch& stretch, const FlatStretch& flat, int64_t step);

}  // namespace zeropage::optim

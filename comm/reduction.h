// The fixed order in which ranks' contributions are added.
//
// A reduction over ranks [0, n) is the reduction over [0, h) combined with that over [h, n), h the
// largest power of two below n: ((0 1)(2 3))((4 5) 6) for seven ranks. It is taken element by
// element, in fp32 for bf16 and fp16 with one rounding at the end; a mean divides after the sum and
// before that rounding. The result depends on nothing but the values: not on bucket, slice,
// transport or timing.
#pragma once

#include <span>

#include <c10/core/ScalarType.h>

#include "comm/communicator.h"

namespace zeropage::comm {

// out[i] = reduction over r of contributions[r][i], i in [0, numel). `out` may be one of the
// contributions. Throws for a dtype that it does not know.
void reduce_in_rank_order(std::span<const void* const> contributions, void* out, int64_t numel,
                          c10::ScalarType dtype, ReduceOp op);

}  // namespace zeropage::comm

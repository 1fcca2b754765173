// The fixed order in which ranks' contributions are added.
//
// A reduction over ranks [0, n) is the reduction over [0, h) combined with that over [h, n), h the
// largest power of two below n: ((0 1)(2 3))((4 5) 6) for seven ranks. It is taken element by
// element, in fp32 for bf16 and fp16 with one rounding at the end; a mean divides after the sum and
// before that rounding. The result depends on nothing but the values: not on bucket, slice,
// transport or timing.
#pragma once

#include <span>
#include <vector>

#include <c10/core/ScalarType.h>

#include "comm/communicator.h"

namespace zeropage::comm {

// The dtype in which sums of elements of that dtype are held until they are rounded.
c10::ScalarType accumulator_of(c10::ScalarType dtype);

// Ranks [begin, end).
struct RankRange {
  int begin = 0;
  int end = 0;

  int size() const { return end - begin; }
  friend bool operator==(const RankRange&, const RankRange&) = default;
};

// The largest subtrees of the tree over ranks [0, size) that lie wholly within `ranks`, in rank
// order: what these ranks can add among themselves without changing a bit of the whole. ranks:
// ascending.
std::vector<RankRange> maximal_subtrees(std::span<const int> ranks, int size);

// out[i] = reduction over r of contributions[r][i], i in [0, numel). `out` may be one of the
// contributions. Throws for a dtype that it does not know.
void reduce_in_rank_order(std::span<const void* const> contributions, void* out, int64_t numel,
                          c10::ScalarType dtype, ReduceOp op);

// The same without the division and the rounding, for consecutive ranks that are a subtree: `out` is
// of accumulator_of(dtype).
void reduce_to_accumulators(std::span<const void* const> contributions, void* out, int64_t numel,
                            c10::ScalarType dtype, ReduceOp op);

// A partial sum of a subtree: the contribution of one rank, in the reduction's dtype, or the accumulators of
// several.
struct Partial {
  RankRange ranks;
  const void* data = nullptr;
};

// reduce_in_rank_order over all ranks from what is known of subtrees, bit for bit. partials: in rank
// order, together all ranks. `out` may be a contribution.
void combine_in_rank_order(std::span<const Partial> partials, void* out, int64_t numel,
                           c10::ScalarType dtype, ReduceOp op);

}  // namespace zeropage::comm

// The head and its loss in tiles of tokens, and their gradients in the same pass.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/TensorBody.h>

#include "zeropage/detail/slices.h"

namespace zeropage::fused {

struct HeadArguments {
  at::Tensor hidden;   // [tokens, width]
  at::Tensor weight;   // [classes of this rank, width]
  at::Tensor bias;     // [classes of this rank]; undefined: none
  at::Tensor targets;  // [tokens] of all classes
  int64_t ignore_index = 0;
  int64_t tile_bytes = 0;  // 0: the default
  // Whose ranks have the other classes. Null: this one has all.
  parallel::RanksPointer ranks = {};
  int64_t classes = 0;  // of all ranks
  // Which gradients are wanted.
  bool of_hidden = false;
  bool of_weight = false;
  bool of_bias = false;
};

// Gradients are those of the losses' sum. They have the arguments' dtypes, but fp32 for fp16, whose range is too small for a sum that
// nothing has scaled yet.
struct HeadResults {
  at::Tensor loss;       // [] the sum over targets that count
  at::Tensor count;      // [] how many do, in the loss's dtype
  at::Tensor of_hidden;  // [tokens, width]
  at::Tensor of_weight;
  at::Tensor of_bias;
};

// Throws on the host for a target that is no class. On a device such a target makes the loss NaN.
HeadResults head_in_tiles(const HeadArguments& head);

}  // namespace zeropage::fused

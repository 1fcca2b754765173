// What a fused step updates, and what it does with the gradient (optim/fused_step.h).
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace zeropage::optim {

// Where a stretch lies, for states that are smaller than fp32.
struct StretchPlace {
  // Seed of the random bits that round bf16 states, together with the step.
  uint64_t seed = 0;
  uint64_t parameter = 0;     // its number, less than 2^30
  int64_t first_element = 0;  // the stretch's first, in the parameter
  // The same in its block of 256, from 0 to 255, for 8-bit states. Each block has a scale of its own,
  // also one of which the stretch has a part; so a stretch is split where a block ends, or not.
  int64_t first_in_block = 0;
};

// What one step updates: flat, contiguous, same numel, one device, no overlap.
struct Stretch {
  // [numel] fp32: the parameter's, or its master weights. bf16 where there are remainders.
  at::Tensor values;
  at::Tensor gradient;  // [numel] fp32, bf16 or fp16
  // [numel] bf16 or fp16: takes over the new values, to nearest even; undefined: none.
  at::Tensor copy_out;
  // [numel] each, as made by make_states: fp32, bf16, or 8-bit codes (uint8), all alike.
  std::vector<at::Tensor> states;
  std::vector<at::Tensor> scales =
      {};                      // of 8-bit states: [blocks] fp32 each, as made by make_scales
  at::Tensor remainders = {};  // [numel] int16: the values' lower bits; undefined: none
  StretchPlace place = {};
  // copy_out holds what the last step copied there. What somebody wrote to it since becomes the
  // values, element by element, before the step: the others keep their lower bits. Costs its reading.
  bool adopts_copy = false;
};

// What becomes of the gradient when it was read.
enum class GradientAfter : uint8_t {
  kKept,
  // Zero, also where found_inf keeps all else: what zero_grad(false) would do in a pass of its own.
  // Costs the writing of the gradient, and no reading.
  kZeroed,
};

struct GradientFactors {
  // The gradient is multiplied by it, in fp32, first of all: 1 / loss scale times the factor of
  // clipping. Default: 1.
  double scale = 1;
  // [1] fp32 on the stretch's device. If it is not 0 when the step runs, values, states and copies
  // stay as they are. Undefined: the step is always made.
  at::Tensor found_inf;
  GradientAfter after = GradientAfter::kKept;
};

}  // namespace zeropage::optim

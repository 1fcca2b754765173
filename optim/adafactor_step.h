// What the two steps of Adafactor share: on whole tensors (zeropage/adafactor.h), and on parts of them
// (zero/update/factored_update.h).
#pragma once

#include <cstdint>

#include <ATen/core/TensorBody.h>

#include "optim/update_rule.h"
#include "zeropage/adafactor.h"

namespace zeropage::optim {

// PyTorch's names.
inline constexpr const char* kRowMoments = "row_var";     // [..., m, 1]
inline constexpr const char* kColumnMoments = "col_var";  // [..., 1, n]
inline constexpr const char* kMoments = "variance";  // of a parameter that has no rows and columns

// Whether a parameter of these sizes has moments of rows and columns.
inline bool is_factored(at::IntArrayRef sizes) {
  return sizes.size() >= 2;
}

// By which moments move in a step, which is counted from 1.
double moment_rate(const AdafactorOptions& options, int64_t step);

// The second pass, whose directions are multiplied by the form's factor.
UpdateRule descent_of(const AdafactorOptions& options, int64_t step);

// The first pass of elements that have a moment each: moves moments, and writes directions. All flat and alike;
// gradient: fp32, bf16 or fp16, multiplied by the scale; the others fp32.
void direct_by_moments(const AdafactorOptions& options, int64_t step, const at::Tensor& gradient,
                       float scale, const at::Tensor& moments, const at::Tensor& directions);

}  // namespace zeropage::optim

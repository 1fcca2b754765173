// What is the same for all updates that have two passes (optim/tensor_form.h). Ranges are in the owned part.
#pragma once

#include <cstdint>

#include <ATen/core/TensorBody.h>

#include "optim/update_rule.h"
#include "zero/update/page_update.h"

namespace zeropage::zero {

// Writes the range's values to `to`, [owned numel], in fp32 with all their digits and with what the user wrote to the parameters.
void copy_exact_values(const OwnedPart& part, const Range& range, const at::Tensor& to);

// The second pass over the range: a step along directions, [owned numel], times the factor.
void descend_along(const OwnedPart& part, const Range& range, const optim::UpdateRule& rule,
                   int64_t step, const at::Tensor& directions, double factor);

}  // namespace zeropage::zero

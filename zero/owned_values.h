// What this rank owns of each page, in place: for those who pass over all of it and want no copies (zeropage/owned_shards.h makes copies).
#pragma once

#include <functional>

#include <ATen/core/TensorBody.h>

#include "zero/pages/master_weights.h"
#include "zeropage/detail/model_ref.h"

namespace zeropage::zero {

// Throws where a step may be under way, and in a simulated world. who: for the message.
void check_values_can_be_read(const ModelRef& model, const char* who);

// Calls visit for every page with its exact values, [owned numel]: fp32 where the optimizer keeps more digits than the
// parameters have, else the parameters' own. They are this rank's memory, or made for the call; visit does not write.
void visit_exact_values(const ModelRef& model, const char* who,
                        const std::function<void(size_t page, const at::Tensor& exact)>& visit);

}  // namespace zeropage::zero

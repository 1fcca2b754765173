// Which tensors can live in a page. Throws about those that cannot.
#pragma once

#include <vector>

#include <c10/core/Device.h>

#include "zero/layout/module_parameters.h"
#include "zero/layout/shard_layout.h"

namespace zeropage::zero {

// The elements of its storage that a tensor reaches: [first, last + 1). Empty tensors reach none.
Range reach(const at::Tensor& tensor);

// from_tape: of a module that was constructed without memory.
void check_can_be_placed(const NamedParameter& named, c10::Device device, bool from_tape);

// sharing: parameters in one storage.
void check_no_overlap(const std::vector<const NamedParameter*>& sharing);

}  // namespace zeropage::zero

// Fused attention of the CPU on the fake accelerator: LibTorch's choice between it and plain
// operators, and its sizes on the meta device.
#pragma once

#include <torch/library.h>

namespace zeropage::testing {

// Makes scaled_dot_product_attention choose as it does on the CPU, so its bits are the same.
void choose_attention_as_cpu(torch::Library& aten);

void add_attention_meta(torch::Library& aten_meta);

}  // namespace zeropage::testing

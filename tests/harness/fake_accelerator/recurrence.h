// The LSTM cell of the fake accelerator. LibTorch takes a fused one for every device but the CPU.
#pragma once

#include <torch/library.h>

namespace zeropage::testing {

// For the device's own key and for its autograd: the cell is made of operators that autograd knows.
void add_recurrent_kernels(torch::Library& aten);

}  // namespace zeropage::testing

// Sizes of what LibTorch's C++ library lacks on the meta device, beside operators/meta_operators: operators
// of training loops and of tests. What is lacking still runs, but while the host waits.
#pragma once

#include <torch/library.h>

namespace zeropage::testing {

void add_meta_kernels(torch::Library& aten_meta);

}  // namespace zeropage::testing

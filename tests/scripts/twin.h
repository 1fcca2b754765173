// The same script under plainer settings, whose values must have the same bits.
#pragma once

#include "tests/scripts/script.h"

namespace zeropage::scripts {

// At stage 0, with pages of 1 MiB, nothing that leaves the device, activations that are kept, and without a pipeline
// where nothing is tied or sliced. Ranks along "data" and "tensor" are the same, as others add up in another order.
Script twin_of(Script script);

}  // namespace zeropage::scripts

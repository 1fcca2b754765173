// The traits of an optimizer, for the headers of classes that have them (zeropage/optimizer.h).
#pragma once

#include "zeropage/detail/update_reads.h"

namespace zeropage {

template <typename A>
struct OptimizerTraits;

}  // namespace zeropage

// The figures as a picture: bytes at the busiest link and time, each over the number of ranks, both axes
// logarithmic. Lines are modelled, dots measured.
#pragma once

#include <string>

#include "all_reduce_shapes/figures.h"

namespace all_reduce_shapes {

std::string svg(const Options& options, const Figures& figures);

}  // namespace all_reduce_shapes

// Where gradients live, as the byte plan says.
#pragma once

#include <memory>

#include "zero/gradients/gradient_buckets.h"
#include "zero/pages/parameter_pages.h"
#include "zeropage/options.h"

namespace zeropage::zero {

std::unique_ptr<GradientBuckets> make_gradient_buckets(const Options& options,
                                                       std::shared_ptr<ParameterPages> pages);

}  // namespace zeropage::zero

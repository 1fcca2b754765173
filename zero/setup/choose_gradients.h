// Where gradients live at a stage: the one place that reads what of gradients and optimizer state is sharded.
#pragma once

#include <memory>

#include "zero/gradients/gradient_buckets.h"
#include "zero/options.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage {

// What one rank updates of each page, at that stage.
Ownership ownership_of(const Stage& stage);

std::unique_ptr<GradientBuckets> make_gradient_buckets(const Options& options,
                                                       std::shared_ptr<ParameterPages> pages);

}  // namespace zeropage

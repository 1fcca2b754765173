// Access to the whole model, of which a rank has some stages.
#pragma once

#include <functional>
#include <string>

#include <ATen/core/TensorBody.h>

#include "zero/pipeline/pipeline.h"

namespace zeropage {

// Calls visit(name, values) for every parameter of the model, in its order, a tied one under each of its names; values:
// whole, until visit returns, the same on all ranks. Where ranks have slices of parameters, each sees the values of
// its own. Sends each parameter to all ranks of the pipeline. Collective.
void visit_whole_model(const Pipeline::Model& model,
                       const std::function<void(const std::string&, const at::Tensor&)>& visit);

}  // namespace zeropage

// Whole parameters as exact as the optimizer has them: fp32 values where parameters are in bf16 or fp16 and are trained.
#pragma once

#include <functional>
#include <string>

#include "language_model/model/wrapped_model.h"

namespace language_model {

// Calls visit for each parameter that `wanted` names, a tied one under its first name, with its values on the model's device. The
// values of a parameter that the optimizer keeps no more digits of have its dtype. wanted: the same on all ranks.
// Memory: the largest of them, twice. Between steps. Collective.
void visit_exact_values(
    const WrappedModel& model, const std::function<bool(const std::string& name)>& wanted,
    const std::function<void(const std::string& name, const torch::Tensor& values)>& visit);

}  // namespace language_model

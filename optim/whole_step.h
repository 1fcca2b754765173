// A step of an optimizer of two passes on whole tensors of one process: what the classes of torch::optim do by themselves.
#pragma once

#include <vector>

#include <ATen/core/TensorBody.h>

#include "optim/flat_norm.h"
#include "optim/fused_step.h"
#include "optim/tensor_form.h"
#include "zeropage/check.h"

namespace zeropage::offload {

// The parameter's values, or gradient, flat, if they can be stepped where they lie.
// who: "Muon". Throws unless they are fp32 of one memory, and the gradient is dense and alike.
void check_steppable(const char* who, const at::Tensor& parameter, const at::Tensor& gradient);

// states: as state_names(options) has them, shaped as the parameter. step: counted from 1.
template <HasFusedStep Options>
void whole_step(const char* who, const Options& options, int64_t step, const TensorForm& form,
                const at::Tensor& parameter, const at::Tensor& given,
                const std::vector<at::Tensor>& states) {
  check_steppable(who, parameter, given);
  const at::Tensor gradient = given.contiguous();
  Stretch stretch{.values = parameter.view(-1), .gradient = gradient.view(-1)};
  for (const at::Tensor& state : states) stretch.states.push_back(state.view(-1));
  const UpdateReads reads = form.reads(options);
  if (reads == UpdateReads::kElement) return fused_step(options, step, stretch);
  const std::string objection = form.objection_to(options, parameter.sizes());
  ZP_CHECK(objection.empty(), who, ": a parameter of sizes ", parameter.sizes(), objection);
  const at::Tensor values = stretch.values;
  at::Tensor directions = values.clone();
  stretch.values = directions;
  TensorForm::Sums sums;
  if (reads == UpdateReads::kSums) sums.values = sum_of_squares(values.cpu());
  fused_step(options, step, stretch);
  if (reads == UpdateReads::kSums) sums.directions = sum_of_squares(directions.cpu());
  if (reads == UpdateReads::kMatrix) form.transform(options, directions.view(parameter.sizes()));
  const Stretch along{.values = values, .gradient = directions};
  detail::fused_step(descent_of(options), step, {&along, 1},
                     {.scale = form.factor(options, parameter.sizes(), sums)});
}

}  // namespace zeropage::offload

// A step of an optimizer of two passes on whole tensors of one process: what the classes of torch::optim do by themselves.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>

#include "optim/flat_norm.h"
#include "optim/fused_step.h"
#include "optim/tensor_form.h"
#include "zeropage/check.h"

namespace zeropage::optim {

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
  optim::detail::fused_step(descent_of(options), step, {&along, 1},
                            {.scale = form.factor(options, parameter.sizes(), sums)});
}

// A step of a class of torch::optim with such options: calls step(options, parameter, state) for the groups' parameters that
// have a gradient; it counts the step in the State. Returns the closure's loss, or an undefined tensor.
template <typename Options, typename State, typename Step>
at::Tensor step_groups(
    const torch::optim::Optimizer::LossClosure& closure,
    std::vector<torch::optim::OptimizerParamGroup>& groups,
    ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& states,
    const Step& step) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  for (auto& group : groups) {
    const auto& options = static_cast<const Options&>(group.options());
    check_options(options);
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      auto& slot = states[parameter.unsafeGetTensorImpl()];
      if (!slot) slot = std::make_unique<State>();
      step(options, parameter, static_cast<State&>(*slot));
    }
  }
  return loss;
}

// The tensor, made of zeros shaped as the parameter where it is undefined.
at::Tensor made_alike(at::Tensor& tensor, const at::Tensor& parameter);

}  // namespace zeropage::optim

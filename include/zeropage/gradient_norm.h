// The L2 norm of the gradients of all ranks: the same number, bit for bit, at every stage, for any
// split over ranks, any size of pages and any order of parameters.
//
// The square of each element is added exactly (optim/exact_squares.h, optim/exact_sum.h). So it does
// not matter where an element lies and which rank has it. The sum is rounded once, then its root is.
//
// Where parameters are slices (zeropage/parallel_layers.h), the norm is that of the whole module's gradients, and
// a parameter is not finite where any slice of it is not. All ranks of the tensor-parallel group get the same
// number, so they decide alike. If the gradients are equal, it is the number that one rank with the whole module
// gets. Costs
// a second message, over the group, and twice as many sums in both.
//
// Costs a read of what this rank owns, on an accelerator in a launch a page, and a message of 0.6 KiB,
// as much again a group, and a bit a parameter to each rank. The host waits for the gradients.
// Collective. Threads: the training thread, after a backward that averages and before the step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include "zeropage/detail/model_ref.h"

namespace zeropage {

struct GradientNorm {
  double total = 0;
  std::vector<double> of_group = {};  // by parameter group of the optimizer that was given
  // The parameters with an infinity or NaN in their gradients, in the module's order.
  std::vector<std::string> not_finite = {};
};

GradientNorm gradient_norm(const ModelRef& model);
GradientNorm gradient_norm(const ModelRef& model, const torch::optim::Optimizer& optimizer);

// The norm of all gradients before and after a clipping. As a number it is the norm before, which
// torch::nn::utils::clip_grad_norm_ returns.
struct ClippedNorm {
  double before = 0, after = 0;

  operator double() const { return before; }
};

// What to do about gradients that are not finite.
enum class NotFinite : uint8_t {
  // kReturn behind the last backward() of an Accumulator whose loss scale changes: its step() is left out then, and lowers
  // the scale. Otherwise kThrow, also where a script scales the loss itself.
  kAsTheStep,
  kThrow,   // on all ranks, and change nothing
  kReturn,  // the norm, and change nothing
};

// Multiplies all gradients by max_norm / (norm + 1e-6) if that is below 1, as
// torch::nn::utils::clip_grad_norm_ does, where this rank owns them: nothing is gathered.
ClippedNorm clip_grad_norm_(const ModelRef& model, double max_norm,
                            NotFinite not_finite = NotFinite::kAsTheStep);
// Clamps all gradients to [-clip_value, clip_value], where this rank owns them. NaN stays NaN.
void clip_grad_value_(const ModelRef& model, double clip_value);

// The factor of clip_grad_norm_, and its result.
double clip_factor(double norm, double max_norm);

}  // namespace zeropage

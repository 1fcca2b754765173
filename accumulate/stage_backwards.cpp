#include "accumulate/stage_backwards.h"

#include <utility>

#include "zeropage/check.h"

namespace zeropage::accumulate {
namespace {

void check_output(const at::Tensor& output, const at::Tensor& gradient) {
  ZP_CHECK(output.defined() && gradient.defined() && output.requires_grad() &&
               output.sizes() == gradient.sizes(),
           "StageBackwards: expected an output that requires grad and its gradient, got ",
           output.defined() ? c10::str("sizes ", output.sizes()) : "an undefined tensor", " and ",
           gradient.defined() ? c10::str("sizes ", gradient.sizes()) : "an undefined tensor");
}

}  // namespace

MicroStepShare StageBackwards::share_elsewhere() const {
  return {.loss = {}, .weight = 1, .scale = verdicts_.scaler().scale()};
}

void StageBackwards::through(const at::Tensor& output, const at::Tensor& gradient) {
  check_output(output, gradient);
  micro_steps_.run(share_elsewhere(), [&] { output.backward(gradient); });
}

void StageBackwards::past_frozen() {
  micro_steps_.run(share_elsewhere(), [] {});
}

SplitMicroStep StageBackwards::begin(const at::Tensor& loss, const at::Tensor& input,
                                     double weight) const {
  const double scale = verdicts_.scaler().scale();
  const at::Tensor seed = seed_of(loss, weight, scale);
  auto of_none = weightless(loss, weight);
  return {accumulate::SplitBackward(loss, seed, input),
          {loss.detach(), weight, scale, std::move(of_none)}};
}

SplitMicroStep StageBackwards::begin_through(const at::Tensor& output, const at::Tensor& gradient,
                                             const at::Tensor& input) const {
  check_output(output, gradient);
  return {accumulate::SplitBackward(output, gradient, input), share_elsewhere()};
}

void StageBackwards::finish(SplitMicroStep split) {
  micro_steps_.run(split.share, [&] { split.backward.finish(); });
}

}  // namespace zeropage::accumulate

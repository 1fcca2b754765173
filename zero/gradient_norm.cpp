#include "zeropage/gradient_norm.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ATen.h>

#include "base/exact.h"
#include "device/named_range.h"
#include "optim/flat_norm.h"
#include "zero/model_parts.h"
#include "zero/norms/norm_sums.h"
#include "zero/norms/not_finite.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/check.h"

namespace zeropage {
namespace {

using optim::ExactSum;

double norm_of(const ExactSum& squares) {
  return std::sqrt(squares.value());
}

GradientNorm norm_in_groups(const ModelRef& model, const std::vector<int>& group_of,
                            size_t groups) {
  const zero::ShardedModel& sharded = model->sharded();
  sharded.gradients->prepare_to_look();
  const bool watches_scale = sharded.sums->watches_scale();
  const zero::NormSums sums = sharded.sums->sum(group_of, groups);
  // What the script does with the norm it may do to one stage.
  if (watches_scale) sharded.sums->watch_scale();
  GradientNorm norm;
  ExactSum total;
  for (const ExactSum& squares : sums.squares_of_group) {
    total.add(squares);
    norm.of_group.push_back(norm_of(squares));
  }
  norm.total = norm_of(total);
  if (!sums.all_finite) norm.not_finite = zero::names_over_stages(*sharded.pages, sums.not_finite);
  return norm;
}

}  // namespace

GradientNorm gradient_norm(const ModelRef& model) {
  const size_t parameters = model->sharded().pages->parameters().size();
  GradientNorm norm = norm_in_groups(model, std::vector<int>(parameters, 0), 1);
  norm.of_group.clear();
  return norm;
}

GradientNorm gradient_norm(const ModelRef& model, const torch::optim::Optimizer& optimizer) {
  const zero::ParameterPages& pages = *model->sharded().pages;
  const auto& groups = optimizer.param_groups();
  std::vector<int> group_of(pages.parameters().size(), -1);
  for (size_t group = 0; group < groups.size(); ++group) {
    for (const at::Tensor& tensor : groups[group].params()) {
      const int64_t index = pages.parameters().index_of(tensor);
      ZP_CHECK(index >= 0, "gradient_norm: a parameter of group ", group, " (sizes ",
               tensor.sizes(),
               ") is not a parameter of the wrapped module; expected an optimizer "
               "of this model");
      group_of[static_cast<size_t>(index)] = static_cast<int>(group);
    }
  }
  return norm_in_groups(model, group_of, groups.size());
}

double clip_factor(double norm, double max_norm) {
  // The torch function's guard against a norm of zero.
  constexpr double kLeast = 1e-6;
  return std::min(1.0, max_norm / (norm + kLeast));
}

ClippedNorm clip_grad_norm_(const ModelRef& model, double max_norm, NotFinite not_finite) {
  ZP_CHECK(max_norm > 0, "clip_grad_norm_: expected a max_norm above 0, got ", max_norm);
  const GradientNorm norm = gradient_norm(model);
  if (!std::isfinite(norm.total)) {
    const bool is_skipped = model->sharded().gradients->mean().is_skipped_at_overflow();
    ZP_CHECK(
        not_finite == NotFinite::kReturn || (not_finite == NotFinite::kAsTheStep && is_skipped),
        "clip_grad_norm_: the norm of the gradients is ", norm.total, ": ",
        zero::say_not_finite(norm.not_finite),
        "; no gradient was changed. Skip this step (zero_grad()), or pass "
        "NotFinite::kReturn and look at the norm");
    return {norm.total, norm.total};
  }
  const double factor = clip_factor(norm.total, max_norm);
  if (factor < 1) {
    model->sharded().gradients->change([factor](const at::Tensor& owned) { owned.mul_(factor); });
  }
  return {norm.total, norm.total * factor};
}

void clip_grad_value_(const ModelRef& model, double clip_value) {
  ZP_CHECK(clip_value > 0, "clip_grad_value_: expected a value above 0, got ", clip_value);
  zero::StepGradients& gradients = *model->sharded().gradients;
  gradients.prepare_to_look();
  gradients.change(
      [clip_value](const at::Tensor& owned) { owned.clamp_(-clip_value, clip_value); });
}

}  // namespace zeropage

#include "fused/experts/routing.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

namespace zeropage::fused {
namespace {

using at::Tensor;
using parallel::Scoring;

// Added to sums of sigmoids, which may all be zero.
constexpr double kLeastSum = 1e-20;

Tensor divided_by_sum(const Tensor& scores) {
  return scores / (scores.sum(-1, /*keepdim=*/true) + kLeastSum);
}

Tensor count(const Tensor& choices, int64_t experts) {
  return at::zeros({experts}, choices.options()).scatter_add_(0, choices, at::ones_like(choices));
}

int64_t capacity_of(const parallel::ExpertsOptions& options, int64_t copies) {
  return static_cast<int64_t>(std::ceil(*options.capacity_factor * static_cast<double>(copies) /
                                        static_cast<double>(options.experts)));
}

// Which copies are beyond their expert's capacity. choices: [copies]; load: [experts].
Tensor is_beyond(int64_t capacity, const Tensor& choices, const Tensor& load,
                 const CopyOrder& order) {
  const Tensor first_row = load.cumsum(0) - load;
  return (order.row_of_copy - first_row.index_select(0, choices)).ge(capacity);
}

}  // namespace

Routing route(const Tensor& scores, const Tensor& bias, const parallel::ExpertsOptions& options) {
  const bool softmax = options.scoring == Scoring::kSoftmax;
  const Tensor scored = softmax ? scores.softmax(-1) : scores.sigmoid();
  Routing routing;
  routing.probabilities = softmax ? scored : divided_by_sum(scored);
  Tensor choices;
  {
    const at::NoGradGuard no_grad;
    const Tensor ranked = bias.defined() ? scored + bias.to(scored.scalar_type()) : scored;
    choices = std::get<1>(ranked.topk(options.active, -1));
  }
  routing.weights = scored.gather(1, choices);
  if (options.normalise) routing.weights = divided_by_sum(routing.weights);

  const Tensor of_copy = choices.reshape({-1});
  routing.load = count(of_copy, options.experts);
  routing.order = sorted_by(of_copy, options.active);
  routing.kept = routing.load;
  if (options.capacity_factor) {
    const int64_t capacity = capacity_of(options, of_copy.numel());
    const Tensor beyond = is_beyond(capacity, of_copy, routing.load, routing.order);
    routing.kept = routing.load.clamp_max(capacity);
    routing.order = sorted_by(of_copy.masked_fill(beyond, options.experts), options.active);
    routing.weights = routing.weights.masked_fill(beyond.view_as(choices), 0);
  }
  routing.rows = {.ends = routing.kept.cumsum(0).to(at::kInt), .all = !options.capacity_factor};
  return routing;
}

Tensor imbalance(const Routing& routing) {
  const int64_t tokens = std::max<int64_t>(1, routing.probabilities.size(0));
  const Tensor chosen = routing.load.to(routing.probabilities.scalar_type()) / tokens;
  const Tensor mean = routing.probabilities.sum(0) / tokens;
  return (chosen * mean).sum() * routing.load.numel();
}

}  // namespace zeropage::fused

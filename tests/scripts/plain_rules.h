// The rules that LibTorch's C++ frontend does not have, by its operators, one parameter after the other.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "zeropage/adafactor.h"
#include "zeropage/lamb.h"
#include "zeropage/muon.h"
#include "zeropage/optimizer.h"

namespace zeropage::scripts {

// A: whose options the groups have.
template <typename A>
class PlainRule : public torch::optim::Optimizer {
 public:
  using Options = typename OptimizerTraits<A>::Options;

  PlainRule(const std::vector<torch::optim::OptimizerParamGroup>& groups, const Options& defaults)
      : Optimizer(groups, std::make_unique<Options>(defaults)) {}

  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      const auto& options = static_cast<const Options&>(group.options());
      for (torch::Tensor& parameter : group.params()) {
        if (!parameter.grad().defined() || parameter.numel() == 0) continue;
        State& state = states_[parameter.unsafeGetTensorImpl()];
        if (state.steps++ == 0 && !std::is_same_v<A, Adafactor>) {
          state.average = torch::zeros_like(parameter);
          state.square = torch::zeros_like(parameter);
        }
        update(options, parameter, parameter.grad(), state);
      }
    }
    return {};
  }

 private:
  struct State {
    int steps = 0;
    torch::Tensor average;
    torch::Tensor square;
    torch::Tensor columns;
  };

  static double mean_square(const torch::Tensor& tensor) {
    return tensor.square().mean().template item<double>();
  }

  // torch.optim.Adafactor's.
  static void update(const AdafactorOptions& options, torch::Tensor& value,
                     const torch::Tensor& gradient, State& state) {
    const auto [root, least] = options.eps();
    const double rate = std::pow(state.steps, options.beta2_decay());
    const double length = std::max(least, std::sqrt(mean_square(value))) *
                          std::min(options.lr(), 1 / std::sqrt(state.steps));
    const auto move = [&](torch::Tensor& moment, const torch::Tensor& mean) {
      moment = moment.defined() ? (1 - rate) * moment + rate * mean : mean;
    };
    value.mul_(1 - options.lr() * options.weight_decay());
    torch::Tensor moment;
    if (gradient.dim() > 1) {
      move(state.average, gradient.square().mean(-1, /*keepdim=*/true));
      move(state.columns, gradient.square().mean(-2, /*keepdim=*/true));
      moment =
          state.average * state.columns / state.average.mean(-2, /*keepdim=*/true).clamp_min(root);
    } else {
      move(state.square, gradient.square());
      moment = state.square;
    }
    const torch::Tensor direction = gradient / moment.clamp_min(root * root).sqrt();
    const double too_long = std::sqrt(mean_square(direction)) / options.d();
    value.sub_(direction, length / std::max(1.0, too_long));
  }

  // Adam's direction.
  template <typename O>
  static torch::Tensor adam(const O& options, const torch::Tensor& gradient, State& state) {
    const auto [beta1, beta2] = options.betas();
    state.average = beta1 * state.average + (1 - beta1) * gradient;
    state.square = beta2 * state.square + (1 - beta2) * gradient * gradient;
    const torch::Tensor root = (state.square / (1 - std::pow(beta2, state.steps))).sqrt();
    return state.average / (1 - std::pow(beta1, state.steps)) / (root + options.eps());
  }

  static void update(const LambOptions& options, torch::Tensor& value,
                     const torch::Tensor& gradient, State& state) {
    const torch::Tensor direction = adam(options, gradient, state) + options.weight_decay() * value;
    const double of_value = value.norm().template item<double>();
    const double of_direction = direction.norm().template item<double>();
    const double ratio = of_value > 0 && of_direction > 0 ? of_value / of_direction : 1;
    value.sub_(direction, options.lr() * ratio);
  }

  static void update(const MuonOptions& options, torch::Tensor& value,
                     const torch::Tensor& gradient, State& state) {
    value.mul_(1 - options.lr() * options.weight_decay());
    if (options.rule() == MuonRule::kAdamW) {
      value.sub_(adam(options, gradient, state), options.lr());
      return;
    }
    state.average = options.momentum() * state.average + (1 - options.momentum()) * gradient;
    const torch::Tensor direction =
        (1 - options.momentum()) * gradient + options.momentum() * state.average;
    torch::Tensor x = direction.reshape({direction.size(0), -1});
    const auto rows = static_cast<double>(x.size(0));
    const auto columns = static_cast<double>(x.size(1));
    const bool is_tall = rows > columns;
    if (is_tall) x = x.t();
    const auto [a, b, c] = options.ns_coefficients();
    x = x / x.norm().clamp_min(options.ns_eps());
    for (int64_t count = 0; count < options.ns_steps(); ++count) {
      const torch::Tensor gram = x.mm(x.t());
      x = a * x + (b * gram + c * gram.mm(gram)).mm(x);
    }
    if (is_tall) x = x.t();
    value.sub_(x.reshape(value.sizes()), options.lr() * std::sqrt(std::max(1.0, rows / columns)));
  }

  std::unordered_map<const c10::TensorImpl*, State> states_;
};

// The class that LibTorch's side steps with.
template <typename A>
using PlainClass =
    std::conditional_t<OptimizerTraits<A>::kReads == UpdateReads::kElement, A, PlainRule<A>>;

}  // namespace zeropage::scripts

#include "tests/scripts/expert_unit.h"

#include <cmath>
#include <utility>

#include "tests/scripts/composed_module.h"

namespace zeropage::scripts {
namespace {

using parallel::ExpertActivation;
using parallel::ExpertsOptions;
using parallel::Scoring;

ExpertsOptions options_of_experts(Kind kind) {
  ExpertsOptions options(kWidth, /*d_hidden=*/8, /*experts=*/4, /*active=*/2);
  if (kind == Kind::kSigmoidExperts) {
    options.scoring = Scoring::kSigmoid;
    options.activation = ExpertActivation::kGelu;
    options.normalise = false;
    options.balance_bias_rate = 0.05;
  } else {
    options.balance_loss = 0.2;
  }
  if (kind == Kind::kTightExperts) options.capacity_factor = 0.75;
  return options;
}

}  // namespace

ExpertUnit::ExpertUnit(Kind kind) : kind_(kind), layer_(options_of_experts(kind)) {}

torch::Tensor ExpertUnit::forward(const torch::Tensor& x, int pass, int rank, bool is_plain) {
  if (kind_ != Kind::kTightExperts) return of_rows(x, is_plain);
  const int64_t all = x.size(0);
  const int64_t rows = layer_->is_training() ? (3 * pass + 2 * rank + 1) % (all + 1) : all;
  const torch::Tensor y =
      torch::cat({of_rows(x.narrow(0, 0, rows), is_plain), x.narrow(0, rows, all - rows)});
  return y + taken_loss(is_plain).to(y.scalar_type());
}

torch::Tensor ExpertUnit::auxiliary_loss(bool is_plain) {
  return kind_ == Kind::kExperts ? taken_loss(is_plain) : torch::Tensor();
}

torch::Tensor ExpertUnit::taken_loss(bool is_plain) {
  if (!is_plain) return layer_->auxiliary_loss();
  const torch::Tensor loss = std::exchange(loss_, torch::Tensor());
  return loss.defined() ? loss : torch::zeros({}, torch::kDouble);
}

void ExpertUnit::update_balance(const comm::World* world) {
  if (kind_ != Kind::kSigmoidExperts) return;
  if (world != nullptr) return layer_->update_balance(*world);
  if (!load_.defined()) return;
  layer_->balance_bias.add_((load_.mean() - load_).sign(), layer_->options().balance_bias_rate);
  forget_load();
}

torch::Tensor ExpertUnit::plain_expert(const torch::Tensor& x, int64_t expert) const {
  const torch::Tensor up = torch::linear(x, layer_->w_up[expert]);
  const torch::Tensor hidden = layer_->w_gate.defined()
                                   ? torch::silu(torch::linear(x, layer_->w_gate[expert])) * up
                                   : torch::gelu(up);
  return torch::linear(hidden, layer_->w_down[expert]);
}

// All experts for all rows, and a factor of 0 where a row has not chosen one.
torch::Tensor ExpertUnit::plainly(const torch::Tensor& x) {
  const ExpertsOptions& options = layer_->options();
  const torch::Tensor logits = torch::linear(x, layer_->router);
  const torch::Tensor scores =
      options.scoring == Scoring::kSoftmax ? torch::softmax(logits, -1) : torch::sigmoid(logits);
  const torch::Tensor& bias = layer_->balance_bias;
  const torch::Tensor ranked = bias.defined() ? scores.detach() + bias : scores.detach();
  const torch::Tensor chosen = std::get<1>(ranked.topk(options.active, -1));
  const torch::Tensor choices = torch::zeros_like(ranked).scatter_(1, chosen, 1);  // 0 and 1
  torch::Tensor weights = scores * choices;
  if (options.normalise) weights = weights / weights.sum(-1, /*keepdim=*/true);
  const auto rows = static_cast<double>(x.size(0));
  if (options.capacity_factor) {
    const double places =
        std::ceil(*options.capacity_factor * rows * static_cast<double>(options.active) /
                  static_cast<double>(options.experts));
    weights = weights * (choices.cumsum(0) <= places);
  }
  torch::Tensor y = torch::zeros_like(x);
  for (int64_t expert = 0; expert < options.experts; ++expert) {
    y = y + plain_expert(x, expert) * weights.narrow(1, expert, 1);
  }
  if (!layer_->is_training() || !torch::GradMode::is_enabled()) return y;
  load_ = load_.defined() ? load_ + choices.sum(0).detach() : choices.sum(0).detach();
  if (options.balance_loss > 0 && rows > 0) {
    const torch::Tensor parts = scores / scores.sum(-1, /*keepdim=*/true);
    const torch::Tensor loss = (choices.mean(0) * parts.mean(0)).sum() * options.balance_loss *
                               static_cast<double>(options.experts);
    loss_ = loss_.defined() ? loss_ + loss : loss;
  }
  return y;
}

}  // namespace zeropage::scripts

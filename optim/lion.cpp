#include "zeropage/lion.h"

#include <torch/serialize/archive.h>

#include "optim/cuda/fused_step.h"
#include "optim/fused_step.h"
#include "zeropage/check.h"

namespace zeropage {
namespace {

bool is_contiguous_fp32(const torch::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.is_contiguous();
}

bool has_fused_step(const torch::Tensor& parameter, const torch::Tensor& gradient,
                    const torch::Tensor& exp_avg) {
  return (parameter.is_cpu() || (parameter.is_cuda() && optim::cuda::is_built())) &&
         is_contiguous_fp32(parameter) && is_contiguous_fp32(gradient) &&
         is_contiguous_fp32(exp_avg);
}

void step_with_operators(const LionOptions& options, const torch::Tensor& parameter,
                         const torch::Tensor& gradient, const torch::Tensor& exp_avg) {
  const auto [beta1, beta2] = options.betas();
  const torch::Tensor update = exp_avg.mul(beta1).add_(gradient, 1 - beta1).sign_();
  parameter.mul_(1 - options.lr() * options.weight_decay()).add_(update, -options.lr());
  exp_avg.mul_(beta2).add_(gradient, 1 - beta2);
}

}  // namespace

LionOptions::LionOptions(double lr) : lr_(lr) {}

void LionOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
}

void LionOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
}

double LionOptions::get_lr() const {
  return lr();
}

void LionOptions::set_lr(double lr) {
  this->lr(lr);
}

bool operator==(const LionOptions& one, const LionOptions& other) {
  return one.lr() == other.lr() && one.betas() == other.betas() &&
         one.weight_decay() == other.weight_decay();
}

void LionParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, exp_avg);
}

void LionParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
}

bool operator==(const LionParamState& one, const LionParamState& other) {
  return torch::equal(one.exp_avg(), other.exp_avg());
}

void check_options(const LionOptions& options) {
  const auto [beta1, beta2] = options.betas();
  ZP_CHECK(options.lr() >= 0, "Lion: lr: expected 0 or more, got ", options.lr());
  ZP_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1,
           "Lion: betas: expected each in [0, 1), got ", beta1, " and ", beta2);
  ZP_CHECK(options.weight_decay() >= 0, "Lion: weight_decay: expected 0 or more, got ",
           options.weight_decay());
}

Lion::Lion(const std::vector<torch::optim::OptimizerParamGroup>& groups,
           const LionOptions& defaults)
    : Optimizer(groups, std::make_unique<LionOptions>(defaults)) {
  check_options(defaults);
  for (const auto& group : param_groups_) {
    check_options(static_cast<const LionOptions&>(group.options()));
  }
}

LionParamState& Lion::state_of(const torch::Tensor& parameter) {
  auto& state = state_[parameter.unsafeGetTensorImpl()];
  if (!state) {
    auto made = std::make_unique<LionParamState>();
    made->exp_avg(torch::zeros_like(parameter, at::MemoryFormat::Preserve));
    state = std::move(made);
  }
  return static_cast<LionParamState&>(*state);
}

torch::Tensor Lion::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  const torch::NoGradGuard no_grad;
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const LionOptions&>(group.options());
    check_options(options);
    for (const torch::Tensor& parameter : group.params()) {
      const torch::Tensor& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      ZP_CHECK(!gradient.is_sparse(), "Lion: a parameter of sizes ", parameter.sizes(),
               ": expected a dense gradient, got a sparse one; call to_dense() on it, or make the "
               "layer with sparse(false)");
      const torch::Tensor& exp_avg = state_of(parameter).exp_avg();
      if (!has_fused_step(parameter, gradient, exp_avg)) {
        step_with_operators(options, parameter, gradient, exp_avg);
        continue;
      }
      const optim::Stretch stretch{.values = parameter.view(-1),
                                   .gradient = gradient.view(-1),
                                   .copy_out = {},
                                   .states = {exp_avg.view(-1)}};
      optim::fused_step(options, /*step=*/1, stretch, {});
    }
  }
  return loss;
}

void Lion::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<LionParamState, LionOptions>(archive, *this);
}

void Lion::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<LionParamState, LionOptions>(archive, *this);
}

}  // namespace zeropage

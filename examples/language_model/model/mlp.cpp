#include "language_model/model/mlp.h"

namespace language_model {

LlamaMlpImpl::LlamaMlpImpl(int64_t width, int64_t mlp_width, bool has_bias) {
  const auto projection = [&](int64_t inputs, int64_t outputs) {
    return Projection(inputs, outputs, has_bias);
  };
  gate_proj = register_module("gate_proj", projection(width, mlp_width));
  up_proj = register_module("up_proj", projection(width, mlp_width));
  down_proj = register_module("down_proj", projection(mlp_width, width));
}

torch::Tensor LlamaMlpImpl::forward(const torch::Tensor& x) {
  return down_proj(zeropage::fused::swiglu(gate_proj(x), up_proj(x)));
}

SparseMlpImpl::SparseMlpImpl(const ModelConfig& config) {
  const ExpertsConfig& of = config.experts.value();
  zeropage::parallel::ExpertsOptions options(config.width, of.width, of.count, of.active);
  options.normalise = of.normalise;
  options.keep_router_sums = of.balance_loss > 0;
  experts = register_module("experts", zeropage::parallel::Experts(options));
  {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& weight : experts->parameters()) weight.zero_();
  }
  if (of.shared_width == 0) return;
  shared_expert =
      register_module("shared_expert", LlamaMlp(config.width, of.shared_width, /*has_bias=*/false));
  shared_expert_gate =
      register_module("shared_expert_gate", Projection(config.width, 1, /*bias=*/false));
}

torch::Tensor SparseMlpImpl::forward(const torch::Tensor& x) {
  const torch::Tensor chosen = experts(x);
  if (shared_expert.is_empty()) return chosen;
  return chosen + torch::sigmoid(shared_expert_gate(x)) * shared_expert(x);
}

}  // namespace language_model

#include "zeropage/lamb.h"

#include <cmath>
#include <memory>

#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include "optim/tensor_form.h"
#include "optim/whole_step.h"
#include "zeropage/check.h"

namespace zeropage {
namespace {

struct LambParamState : public torch::optim::OptimizerCloneableParamState<LambParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(torch::Tensor, exp_avg);
  TORCH_ARG(torch::Tensor, exp_avg_sq);

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, exp_avg);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, exp_avg_sq);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_sq);
  }
};

const LambOptions& lamb(const torch::optim::OptimizerOptions& options) {
  return static_cast<const LambOptions&>(options);
}

class LambForm final : public optim::TensorForm {
 public:
  double states(const Options& options, at::IntArrayRef /*sizes*/) const override {
    return static_cast<double>(optim::state_names(lamb(options)).size());
  }
  UpdateReads reads(const Options& /*options*/) const override { return UpdateReads::kSums; }

  double factor(const Options& options, at::IntArrayRef /*sizes*/,
                const Sums& sums) const override {
    if (!lamb(options).trust_ratio()) return 1;
    const double of_values = std::sqrt(sums.values.value());
    const double of_directions = std::sqrt(sums.directions.value());
    return of_values > 0 && of_directions > 0 ? of_values / of_directions : 1;
  }
};

}  // namespace

namespace optim {

std::shared_ptr<const TensorForm> lamb_form() {
  return std::make_shared<const LambForm>();
}

}  // namespace optim

LambOptions::LambOptions(double lr) : lr_(lr) {}

void LambOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, trust_ratio);
}

void LambOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(trust_ratio);
}

double LambOptions::get_lr() const {
  return lr();
}

void LambOptions::set_lr(double lr) {
  this->lr(lr);
}

bool operator==(const LambOptions& one, const LambOptions& other) {
  return one.lr() == other.lr() && one.betas() == other.betas() && one.eps() == other.eps() &&
         one.weight_decay() == other.weight_decay() && one.trust_ratio() == other.trust_ratio();
}

void check_options(const LambOptions& options) {
  const auto [beta1, beta2] = options.betas();
  ZP_CHECK(options.lr() >= 0, "LAMB: lr: expected 0 or more, got ", options.lr());
  ZP_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1,
           "LAMB: betas: expected each in [0, 1), got ", beta1, " and ", beta2);
  ZP_CHECK(options.eps() >= 0, "LAMB: eps: expected 0 or more, got ", options.eps());
  ZP_CHECK(options.weight_decay() >= 0, "LAMB: weight_decay: expected 0 or more, got ",
           options.weight_decay());
}

Lamb::Lamb(const std::vector<torch::optim::OptimizerParamGroup>& groups,
           const LambOptions& defaults)
    : Optimizer(groups, std::make_unique<LambOptions>(defaults)) {
  check_options(defaults);
  for (const auto& group : param_groups_) check_options(lamb(group.options()));
}

torch::Tensor Lamb::step(LossClosure closure) {
  using optim::made_alike;
  return optim::step_groups<LambOptions, LambParamState>(
      closure, param_groups_, state_,
      [](const LambOptions& options, const at::Tensor& parameter, LambParamState& state) {
        optim::whole_step(
            "LAMB", options, ++state.step(), LambForm(), parameter, parameter.grad(),
            {made_alike(state.exp_avg(), parameter), made_alike(state.exp_avg_sq(), parameter)});
      });
}

void Lamb::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<LambParamState, LambOptions>(archive, *this);
}

void Lamb::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<LambParamState, LambOptions>(archive, *this);
}

}  // namespace zeropage

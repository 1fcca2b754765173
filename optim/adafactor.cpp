#include "zeropage/adafactor.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include <ATen/ATen.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include "optim/adafactor_step.h"
#include "optim/factored_moments.h"
#include "optim/tensor_form.h"
#include "optim/whole_step.h"
#include "zeropage/check.h"

namespace zeropage {
namespace {

struct AdafactorParamState
    : public torch::optim::OptimizerCloneableParamState<AdafactorParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(torch::Tensor, row_var);
  TORCH_ARG(torch::Tensor, col_var);
  TORCH_ARG(torch::Tensor, variance);

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, row_var);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, col_var);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, variance);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(row_var);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(col_var);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(variance);
  }
};

const AdafactorOptions& adafactor(const torch::optim::OptimizerOptions& options) {
  return static_cast<const AdafactorOptions&>(options);
}

double root_mean_square(const optim::ExactSum& squares, at::IntArrayRef sizes) {
  return std::sqrt(squares.value() / static_cast<double>(c10::multiply_integers(sizes)));
}

class AdafactorForm final : public optim::TensorForm {
 public:
  double states(const Options& /*options*/, at::IntArrayRef sizes) const override {
    const int64_t numel = c10::multiply_integers(sizes);
    if (!optim::is_factored(sizes) || numel == 0) return 1;
    return static_cast<double>(optim::factored_shape(sizes).sums()) / static_cast<double>(numel);
  }
  bool has_whole_states(at::IntArrayRef sizes) const override { return optim::is_factored(sizes); }
  // They are too small for a tier.
  bool can_leave() const override { return false; }
  UpdateReads reads(const Options& /*options*/) const override { return UpdateReads::kSums; }

  double factor(const Options& options, at::IntArrayRef sizes, const Sums& sums) const override {
    const auto [root, least] = adafactor(options).eps();
    const double too_long = root_mean_square(sums.directions, sizes) / adafactor(options).d();
    // A NaN stays one.
    const double shortened = too_long <= 1 ? 1 : too_long;
    return std::max(least, root_mean_square(sums.values, sizes)) / shortened;
  }
};

// A tensor of these sizes, made of zeros where it is undefined; flat.
at::Tensor made_of(at::Tensor& tensor, std::vector<int64_t> sizes, const at::Tensor& like) {
  if (!tensor.defined()) tensor = at::zeros(sizes, like.options().requires_grad(false));
  return tensor.view(-1);
}

void direct_whole(const AdafactorOptions& options, const at::Tensor& parameter,
                  const at::Tensor& gradient, AdafactorParamState& state,
                  const at::Tensor& directions) {
  using namespace optim;
  if (!optim::is_factored(parameter.sizes())) {
    const at::Tensor moments = made_of(state.variance(), parameter.sizes().vec(), parameter);
    optim::direct_by_moments(options, state.step(), gradient, 1, moments, directions);
    return;
  }
  std::vector<int64_t> of_rows = parameter.sizes().vec();
  std::vector<int64_t> of_columns = of_rows;
  of_rows.back() = 1;
  of_columns[of_columns.size() - 2] = 1;
  const optim::FactoredPart part{.gradient = gradient,
                                 .shape = optim::factored_shape(parameter.sizes())};
  const optim::FactoredMoments moments{.shape = part.shape,
                                       .rows = made_of(state.row_var(), of_rows, parameter),
                                       .columns = made_of(state.col_var(), of_columns, parameter)};
  const at::Tensor magnitudes = at::zeros({part.shape.sums()}, gradient.options());
  optim::raise_to_magnitudes(part, magnitudes);
  const at::Tensor sums = at::zeros_like(magnitudes, at::kDouble);
  optim::add_squares(part, optim::windows_of(part.shape, magnitudes), sums);
  moments.take(sums, moment_rate(options, state.step()));
  moments.divide_by_roots(part, std::get<0>(options.eps()), directions);
}

void step_whole(const AdafactorOptions& options, const at::Tensor& parameter,
                AdafactorParamState& state) {
  const AdafactorForm form;
  optim::check_steppable("Adafactor", parameter, parameter.grad());
  ++state.step();
  if (parameter.numel() == 0) return;
  const at::Tensor values = parameter.view(-1);
  const at::Tensor directions = at::empty_like(values);
  const optim::TensorForm::Sums of_values{.values = optim::sum_of_squares(values.cpu()),
                                          .directions = {}};
  direct_whole(options, parameter, parameter.grad().contiguous().view(-1), state, directions);
  optim::TensorForm::Sums sums = of_values;
  sums.directions = optim::sum_of_squares(directions.cpu());
  const optim::Stretch along{.values = values, .gradient = directions};
  optim::detail::fused_step(optim::descent_of(options, state.step()), state.step(), {&along, 1},
                            {.scale = form.factor(options, parameter.sizes(), sums)});
}

}  // namespace

namespace optim {

std::shared_ptr<const TensorForm> adafactor_form() {
  return std::make_shared<const AdafactorForm>();
}

double moment_rate(const AdafactorOptions& options, int64_t step) {
  return std::pow(static_cast<double>(step), options.beta2_decay());
}

optim::UpdateRule descent_of(const AdafactorOptions& options, int64_t step) {
  const double step_size = std::min(options.lr(), 1 / std::sqrt(static_cast<double>(step)));
  return optim::DescentRule{.decay = static_cast<float>(1 - options.lr() * options.weight_decay()),
                            .step_size = static_cast<float>(step_size)};
}

// Each operator rounds once, on any device.
void direct_by_moments(const AdafactorOptions& options, int64_t step, const at::Tensor& gradient,
                       float scale, const at::Tensor& moments, const at::Tensor& directions) {
  if (gradient.is_meta()) return;
  const double rate = moment_rate(options, step);
  const at::Tensor scaled = gradient.to(at::kFloat).mul(scale);
  moments.mul_(1 - rate).add_(scaled.square().mul_(rate));
  const double root = std::get<0>(options.eps());
  at::Tensor(directions).copy_(scaled.div_(optim::square_roots(moments.clamp_min(root * root))));
}

}  // namespace optim

AdafactorOptions::AdafactorOptions(double lr) : lr_(lr) {}

void AdafactorOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, beta2_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(eps_t, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, d);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
}

void AdafactorOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(beta2_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(d);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
}

double AdafactorOptions::get_lr() const {
  return lr();
}

void AdafactorOptions::set_lr(double lr) {
  this->lr(lr);
}

bool operator==(const AdafactorOptions& one, const AdafactorOptions& other) {
  return one.lr() == other.lr() && one.beta2_decay() == other.beta2_decay() &&
         one.eps() == other.eps() && one.d() == other.d() &&
         one.weight_decay() == other.weight_decay();
}

void check_options(const AdafactorOptions& options) {
  const auto [root, least] = options.eps();
  ZP_CHECK(options.lr() >= 0, "Adafactor: lr: expected 0 or more, got ", options.lr());
  ZP_CHECK(options.beta2_decay() <= 0, "Adafactor: beta2_decay: expected 0 or less, got ",
           options.beta2_decay());
  ZP_CHECK(root >= 0 && least >= 0, "Adafactor: eps: expected each 0 or more, got ", root, " and ",
           least);
  ZP_CHECK(options.d() >= 1, "Adafactor: d: expected 1 or more, got ", options.d());
  ZP_CHECK(options.weight_decay() >= 0, "Adafactor: weight_decay: expected 0 or more, got ",
           options.weight_decay());
}

Adafactor::Adafactor(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     const AdafactorOptions& defaults)
    : Optimizer(groups, std::make_unique<AdafactorOptions>(defaults)) {
  check_options(defaults);
  for (const auto& group : param_groups_) check_options(adafactor(group.options()));
}

torch::Tensor Adafactor::step(LossClosure closure) {
  return optim::step_groups<AdafactorOptions, AdafactorParamState>(closure, param_groups_, state_,
                                                                   step_whole);
}

void Adafactor::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<AdafactorParamState, AdafactorOptions>(archive, *this);
}

void Adafactor::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<AdafactorParamState, AdafactorOptions>(archive, *this);
}

}  // namespace zeropage

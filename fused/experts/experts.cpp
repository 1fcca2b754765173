#include "zeropage/experts.h"

#include <cmath>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/init.h>

#include "fused/experts/routing.h"
#include "fused/operators.h"
#include "zeropage/check.h"
#include "zeropage/fused.h"

namespace zeropage::parallel {
namespace {

using at::Tensor;

constexpr const char* kWho = "parallel::Experts";
// A layer may run several times before a backward; a script that never takes the losses runs more often.
constexpr int kMostUntaken = 32;

// Values of torch::nn::Linear's distribution. [..., inputs]
Tensor drawn(at::IntArrayRef sizes) {
  const double bound = 1 / std::sqrt(static_cast<double>(sizes.back()));
  return torch::nn::init::uniform_(torch::empty(sizes), -bound, bound);
}

// Whether the forward is repeated by a checkpointed region. Its first run has counted already.
bool is_repetition() {
  return torch::autograd::get_current_graph_task_id() >= 0;
}

void check_sizes(const ExpertsOptions& options) {
  ZP_CHECK(options.d_model >= 1 && options.d_hidden >= 1 && options.experts >= 1, kWho,
           ": expected d_model, d_hidden and experts of 1 or more, got ", options.d_model, ", ",
           options.d_hidden, " and ", options.experts, "; look at the order of the arguments");
  ZP_CHECK(options.active >= 1 && options.active <= options.experts, kWho,
           ": expected a token to take from 1 to all ", options.experts, " experts, got ",
           options.active, "; set ExpertsOptions::active, or more experts");
  ZP_CHECK(!options.capacity_factor || *options.capacity_factor > 0, kWho,
           ": expected a capacity_factor above 0, got ", options.capacity_factor.value_or(0),
           "; leave it unset to drop no token");
  ZP_CHECK(options.balance_loss >= 0 && options.balance_bias_rate >= 0, kWho,
           ": expected a balance_loss and a balance_bias_rate of 0 or more, got ",
           options.balance_loss, " and ", options.balance_bias_rate,
           "; less than 0 would send more tokens where most are");
}

}  // namespace

ExpertsImpl::ExpertsImpl(const ExpertsOptions& options) : options_(options) {
  check_sizes(options_);
  reset();
}

void ExpertsImpl::reset() {
  const int64_t d = options_.d_model, hidden = options_.d_hidden, experts = options_.experts;
  router = register_parameter("router", drawn({experts, d}));
  w_up = register_parameter("w_up", drawn({experts, hidden, d}));
  if (options_.activation == ExpertActivation::kSwiglu)
    w_gate = register_parameter("w_gate", drawn({experts, hidden, d}));
  w_down = register_parameter("w_down", drawn({experts, d, hidden}));
  if (options_.balance_bias_rate > 0)
    balance_bias = register_buffer("balance_bias", torch::zeros({experts}));
  load_ = torch::zeros({experts}, torch::kLong);
  untaken_loss_ = Tensor();
  untaken_ = 0;
}

Tensor ExpertsImpl::forward(const Tensor& input) {
  const at::ScalarType dtype = computed_in(input);
  const Tensor tokens = input.reshape({-1, options_.d_model});
  const fused::Routing routing = fused::route(scores_of(tokens), balance_bias, options_);
  if (is_training() && at::GradMode::is_enabled()) {
    const Tensor loss =
        options_.balance_loss > 0 ? fused::imbalance(routing) * options_.balance_loss : Tensor();
    if (!is_repetition()) note(routing.load, loss);
  }

  const auto linear = [&](const Tensor& rows, const Tensor& weight) {
    return fused::expert_linear(rows, weight.to(dtype), routing.rows);
  };
  const Tensor copies = fused::copies_of_tokens(tokens.to(dtype), routing.order);
  const Tensor up = linear(copies, w_up);
  const Tensor hidden = w_gate.defined() ? fused::swiglu(linear(copies, w_gate), up) : at::gelu(up);
  return fused::sum_of_copies(linear(hidden, w_down), routing.weights, routing.order)
      .view(input.sizes());
}

// The dtype of the experts' products.
at::ScalarType ExpertsImpl::computed_in(const Tensor& input) const {
  const at::ScalarType dtype = input.scalar_type();
  ZP_CHECK(at::isFloatingType(dtype), kWho, ": expected an input of floating-point numbers, got ",
           dtype, "; embed ids first");
  ZP_CHECK(input.dim() >= 1 && input.size(-1) == options_.d_model, kWho,
           ": expected an input of [..., ", options_.d_model, "] (d_model), got ", input.sizes(),
           "; give each token's features in the last dimension");
  ZP_CHECK(input.device() == w_up.device(), kWho, ": expected an input on ", w_up.device(),
           ", where the weights are, got ", input.device(), "; move one of them by ->to()");
  const auto device = input.device().type();
  // LibTorch knows no autocast on the meta device.
  if (!input.is_meta() && dtype != at::kDouble && at::autocast::is_autocast_enabled(device))
    return at::autocast::get_autocast_dtype(device);
  ZP_CHECK(dtype == w_up.scalar_type(), kWho, ": expected an input of ", w_up.scalar_type(),
           ", as the weights, got ", dtype, "; convert the input, or run under autocast");
  return dtype;
}

Tensor ExpertsImpl::scores_of(const Tensor& tokens) const {
  const auto wide = fused::wide_type(tokens);
  // One expert of all tokens, since autocast would run LibTorch's own linear layers in low precision.
  const Tensor end = at::full({1}, tokens.size(0), at::kInt);
  return fused::expert_linear(tokens.to(wide), router.to(wide).unsqueeze(0),
                              {.ends = end, .all = true});
}

void ExpertsImpl::note(const Tensor& load, const Tensor& loss) {
  if (balance_bias.defined()) {
    load_ = load_.to(load.device());
    load_.add_(load);
  }
  if (!loss.defined()) return;
  ZP_CHECK(
      untaken_ < kMostUntaken, kWho, ": ", untaken_,
      " forwards have added losses of balance that nobody has taken; add auxiliary_loss() to the "
      "loss before each backward, or set ExpertsOptions::balance_loss to 0");
  untaken_loss_ = untaken_loss_.defined() ? untaken_loss_ + loss : loss;
  ++untaken_;
}

Tensor ExpertsImpl::auxiliary_loss() {
  const Tensor loss = std::exchange(untaken_loss_, Tensor());
  untaken_ = 0;
  if (loss.defined()) return loss;
  return at::zeros({}, router.options().dtype(fused::wide_type(router)).requires_grad(false));
}

void ExpertsImpl::update_balance(const comm::World& world) {
  ZP_CHECK(
      balance_bias.defined(), kWho,
      ": update_balance(): expected a layer with a balance_bias_rate above 0, got one without; set "
      "ExpertsOptions::balance_bias_rate, or leave the call out");
  const at::ScalarType dtype = balance_bias.scalar_type();
  ZP_CHECK(dtype == at::kFloat || dtype == at::kDouble, kWho,
           ": update_balance(): expected a balance_bias of Float or Double, got ", dtype,
           ", which would lose steps of ", options_.balance_bias_rate,
           "; cast parameters by Options::compute_dtype, which leaves buffers as they are");
  const at::NoGradGuard no_grad;
  const Tensor load = world.sum(load_);
  const Tensor direction = (load.sum() - load * load.numel()).sign();
  balance_bias.add_(direction.to(balance_bias.options()), options_.balance_bias_rate);
  load_.zero_();
}

void ExpertsImpl::pretty_print(std::ostream& stream) const {
  stream << "zeropage::parallel::Experts(d_model=" << options_.d_model
         << ", d_hidden=" << options_.d_hidden << ", experts=" << options_.experts
         << ", active=" << options_.active << ")";
}

}  // namespace zeropage::parallel

#include "zeropage/experts.h"

#include <cmath>
#include <memory>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/init.h>

#include "fused/experts/experts_of_rank.h"
#include "fused/experts/router_notes.h"
#include "fused/experts/routing.h"
#include "fused/operators.h"
#include "parallel/experts/experts_mark.h"
#include "parallel/experts/row_exchange.h"
#include "zeropage/check.h"
#include "zeropage/fused.h"

namespace zeropage::parallel {
namespace {

using at::Tensor;

constexpr const char* kWho = "parallel::Experts";

// Values of torch::nn::Linear's distribution. [..., inputs]
Tensor drawn(at::IntArrayRef sizes) {
  const double bound = 1 / std::sqrt(static_cast<double>(sizes.back()));
  return torch::nn::init::uniform_(torch::empty(sizes), -bound, bound);
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

struct ExpertsImpl::Placed {
  RanksPointer experts;
  comm::World same;
  bool is_cut;
  int number;  // of the layers that these ranks have placed
};

ExpertsImpl::ExpertsImpl(const ExpertsOptions& options) : options_(options) {
  check_sizes(options_);
  reset();
}

void ExpertsImpl::reset() {
  const int64_t d = options_.d_model, hidden = options_.d_hidden;
  router = register_parameter("router", drawn({options_.experts, d}));
  // A clone of a layer that was cut takes its values.
  const int64_t experts = experts_here();
  w_up = register_parameter("w_up", drawn({experts, hidden, d}));
  if (options_.activation == ExpertActivation::kSwiglu)
    w_gate = register_parameter("w_gate", drawn({experts, hidden, d}));
  w_down = register_parameter("w_down", drawn({experts, d, hidden}));
  if (options_.balance_bias_rate > 0)
    balance_bias = register_buffer("balance_bias", torch::zeros({options_.experts}));
  notes_ = std::make_shared<fused::RouterNotes>();
}

Tensor ExpertsImpl::forward(const Tensor& input) {
  const at::ScalarType dtype = computed_in(input);
  const Tensor tokens = input.reshape({-1, options_.d_model});
  const fused::Routing routing = fused::route(scores_of(tokens), balance_bias, options_);
  if (is_training() && at::GradMode::is_enabled()) {
    const Tensor loss =
        options_.balance_loss > 0 ? fused::imbalance(routing) * options_.balance_loss : Tensor();
    notes_->add(routing, loss, options_);
  }

  const Tensor copies = fused::copies_of_tokens(tokens.to(dtype), routing.order);
  const Tensor results = placed_ && placed_->is_cut
                             ? by_experts_of_all(copies, routing.kept)
                             : fused::by_experts({w_up, w_gate, w_down}, copies, routing.rows);
  return fused::sum_of_copies(results, routing.weights, routing.order).view(input.sizes());
}

// copies: [rows, d_model], sorted by expert, those without one last. load: [experts], int64, rows of each.
Tensor ExpertsImpl::by_experts_of_all(const Tensor& copies, const Tensor& load) const {
  const RanksPointer& ranks = placed_->experts;
  const std::string name =
      c10::str(kWho, " (", options_.experts, " experts over ", ranks->world.size(), " ranks, ",
               copies.scalar_type(), ", d_model ", options_.d_model, ", d_hidden ",
               options_.d_hidden, "), layer ", placed_->number);
  const fused::ArrivingRows arriving = fused::arriving_rows(load, copies.size(0), ranks, name);
  const auto own = [&ranks](const Tensor& weight) {
    return weight.defined() ? experts::weight_of_layer(weight, ranks->world) : weight;
  };
  const Tensor sent = copies.narrow(0, 0, arriving.sent);
  const Tensor arrived = experts::exchange_rows(sent, arriving.numbers, ranks, name);
  const Tensor sorted = fused::copies_of_tokens(arrived, arriving.order);
  const Tensor results = fused::copies_of_tokens(
      fused::by_experts({own(w_up), own(w_gate), own(w_down)}, sorted, arriving.rows),
      fused::inverse(arriving.order));
  const Tensor back = experts::exchange_rows(results, arriving.numbers.back(), ranks, name);
  // Copies that are dropped have no part in their token's sum.
  const int64_t dropped = copies.size(0) - arriving.sent;
  return dropped == 0 ? back : at::constant_pad_nd(back, {0, 0, 0, dropped});
}

int64_t ExpertsImpl::experts_here() const {
  return placed_ && placed_->is_cut ? options_.experts / placed_->experts->world.size()
                                    : options_.experts;
}

void ExpertsImpl::place(const comm::World& ranks, const comm::World& same, bool is_cut) {
  placed_ =
      std::make_shared<const Placed>(Placed{ranks_of(ranks), same, is_cut, ranks.modules() + 1});
  ranks.add_module();
  const at::NoGradGuard no_grad;
  for (const auto& [weight, cut] : sliced_parameters()) {
    if (!weight.defined()) continue;
    const Tensor whole = weight.detach().contiguous();
    // Each rank's part of one layer, also where ranks have drawn with seeds of their own. Wrapping brings what has no values yet
    // (zero/pages/page_filler.h).
    if (!whole.is_meta()) ranks.communicator().broadcast(whole.view(-1), /*root=*/0, kWho).wait();
    weight.set_data(cut.take(whole, ranks.rank()));
    operators::set_mark(
        weight, c10::make_intrusive<experts::ExpertsMark>(
                    "a weight of experts, which expert_parallel() cut", placed_->experts, cut, same,
                    whole.is_meta() && !ranks.device().is_meta() ? whole : Tensor()));
  }
}

std::vector<SlicedParameter> ExpertsImpl::sliced_parameters() const {
  if (!placed_ || !placed_->is_cut) return {};
  const SlicedDimension cut(
      Slices(options_.experts, /*unit=*/1, placed_->experts->world.size(), kWho));
  return {{w_up, cut}, {w_gate, cut}, {w_down, cut}};
}

const comm::World& ExpertsImpl::ranks_of_slices() const {
  TORCH_INTERNAL_ASSERT(placed_, "the ranks of experts that nobody placed");
  return placed_->experts->world;
}

std::optional<comm::World> ExpertsImpl::ranks_of_same_slices() const {
  return placed_ ? std::optional(placed_->same) : std::nullopt;
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

std::optional<RouterSums> ExpertsImpl::router_sums() {
  ZP_CHECK(options_.keep_router_sums, kWho,
           ": router_sums(): expected a layer that keeps them; set "
           "ExpertsOptions::keep_router_sums, or take auxiliary_loss()");
  return notes_->take_sums();
}

Tensor ExpertsImpl::auxiliary_loss() {
  const Tensor loss = notes_->take_loss();
  if (loss.defined()) return loss;
  return at::zeros({}, router.options().dtype(fused::wide_type(router)).requires_grad(false));
}

Tensor ExpertsImpl::choices() const {
  const Tensor& load = notes_->load();
  const auto options = router.options().dtype(at::kLong).requires_grad(false);
  return load.defined() ? load.to(router.device()) : at::zeros({options_.experts}, options);
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
  const Tensor of_all = world.sum(choices());
  const Tensor direction = (of_all.sum() - of_all * of_all.numel()).sign();
  balance_bias.add_(direction.to(balance_bias.options()), options_.balance_bias_rate);
  notes_->forget_load();
}

void ExpertsImpl::pretty_print(std::ostream& stream) const {
  stream << "zeropage::parallel::Experts(d_model=" << options_.d_model
         << ", d_hidden=" << options_.d_hidden << ", experts=" << options_.experts
         << ", active=" << options_.active << ")";
}

}  // namespace zeropage::parallel

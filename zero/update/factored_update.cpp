#include "zero/update/factored_update.h"

#include <utility>

#include <ATen/ops/zeros.h>

#include "optim/adafactor_step.h"
#include "optim/factored_moments.h"
#include "optim/tensor_form.h"
#include "zero/update/second_pass.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {
namespace {

at::Tensor part_of(const at::Tensor& flat, const ParameterShard& shard) {
  return flat.narrow(0, shard.range.begin, shard.range.numel());
}

optim::FactoredPart factored_part(const ParameterShard& shard, const at::Tensor& gradient,
                                  double scale) {
  return {.gradient = part_of(gradient, shard),
          .scale = static_cast<float>(scale),
          .first = shard.first_element,
          .shape = optim::factored_shape(shard.sizes)};
}

}  // namespace

std::shared_ptr<const FusedForm> factored_form() {
  return std::make_shared<const FusedForm>(
      FusedForm{.make = [](OwnedPart part) -> std::unique_ptr<PageUpdate> {
                  return std::make_unique<FactoredUpdate>(std::move(part));
                },
                .states = 1,
                .tensors = optim::adafactor_form()});
}

void FactoredUpdate::add_groups(std::vector<OwnedGroup> groups) {
  for (OwnedGroup& group : groups) {
    for (ParameterShard& shard : group.shards) {
      ZP_CHECK(
          shard.state_format == StateFormat::kFp32,
          "options.optimizer_state: Adafactor keeps its moments in fp32, and those of a matrix "
          "are a number for each row and column; leave the option out");
      if (shard.range.empty()) continue;
      by_parameter_[shard.parameter] = shards_.size();
      shards_.push_back({.of = std::move(shard), .group = options_.size()});
      if (!shards_.back().of.frozen) make_moments(shards_.back());
    }
    options_.push_back(static_cast<const AdafactorOptions&>(*group.options));
  }
}

void FactoredUpdate::set_options(size_t group, const torch::optim::OptimizerOptions& options) {
  options_[group] = static_cast<const AdafactorOptions&>(options);
  check_options(options_[group]);
}

void FactoredUpdate::make_moments(Shard& shard) const {
  if (!shard.moments.empty()) return;
  const memory::KindScope kind(memory::Kind::kOptimizerState);
  const auto add = [&](int64_t numel) {
    shard.moments.push_back(at::zeros({numel}, part_.values.options().dtype(at::kFloat)));
  };
  if (!optim::is_factored(shard.of.sizes)) return add(shard.of.range.numel());
  const optim::FactoredShape shape = optim::factored_shape(shard.of.sizes);
  add(shape.all_rows());
  add(shape.all_columns());
}

void FactoredUpdate::raise_to_magnitudes(size_t parameter, const at::Tensor& gradient, double scale,
                                         const at::Tensor& magnitudes) {
  optim::raise_to_magnitudes(factored_part(shard_of(parameter).of, gradient, scale), magnitudes);
}

void FactoredUpdate::add_squares(size_t parameter, const at::Tensor& gradient, double scale,
                                 const at::Tensor& windows, const at::Tensor& sums) {
  optim::add_squares(factored_part(shard_of(parameter).of, gradient, scale), windows, sums);
}

void FactoredUpdate::take(size_t parameter, const at::Tensor& sums) {
  Shard& shard = shard_of(parameter);
  make_moments(shard);
  const optim::FactoredMoments moments{.shape = optim::factored_shape(shard.of.sizes),
                                       .rows = shard.moments[0],
                                       .columns = shard.moments[1]};
  moments.take(sums, optim::moment_rate(options_of(shard), shard.steps + 1));
}

void FactoredUpdate::make_directions(const at::Tensor& gradient, const HasGradient& has_gradient,
                                     const optim::GradientFactors& factors,
                                     const at::Tensor& directions,
                                     const std::function<void()>& on_values) {
  for (const Shard& shard : shards_) {
    if (has_gradient(shard.of.parameter)) copy_exact_values(part_, shard.of.range, directions);
  }
  on_values();
  for (Shard& shard : shards_) {
    if (!has_gradient(shard.of.parameter)) continue;
    make_moments(shard);
    ++shard.steps;
    direct(shard, gradient, factors.scale, directions);
  }
}

void FactoredUpdate::direct(const Shard& shard, const at::Tensor& gradient, double scale,
                            const at::Tensor& directions) const {
  const at::Tensor of_shard = part_of(directions, shard.of);
  if (!optim::is_factored(shard.of.sizes)) {
    optim::direct_by_moments(options_of(shard), shard.steps, part_of(gradient, shard.of),
                             static_cast<float>(scale), shard.moments[0], of_shard);
    return;
  }
  const optim::FactoredPart part = factored_part(shard.of, gradient, scale);
  const optim::FactoredMoments moments{
      .shape = part.shape, .rows = shard.moments[0], .columns = shard.moments[1]};
  moments.divide_by_roots(part, std::get<0>(options_of(shard).eps()), of_shard);
}

void FactoredUpdate::step(const at::Tensor& /*gradient*/, const HasGradient& has_gradient,
                          const optim::GradientFactors& /*factors*/, const Directions& directions) {
  for (const Shard& shard : shards_) {
    if (!has_gradient(shard.of.parameter)) continue;
    descend_along(part_, shard.of.range, optim::descent_of(options_of(shard), shard.steps),
                  shard.steps, directions.values, directions.factor(shard.of.parameter));
  }
}

void FactoredUpdate::visit_states(StateAccess access, const VisitState& visit) {
  for (Shard& shard : shards_) {
    OwnedState state{
        .parameter = shard.of.parameter, .range = shard.of.range, .steps = shard.steps};
    const bool had_moments = !shard.moments.empty();
    if (!had_moments && access != StateAccess::kWrite) {
      state.takes_others = true;
      visit(state);
      continue;
    }
    make_moments(shard);
    if (optim::is_factored(shard.of.sizes)) {
      std::vector<int64_t> of_rows = shard.of.sizes;
      std::vector<int64_t> of_columns = shard.of.sizes;
      of_rows.back() = 1;
      of_columns[of_columns.size() - 2] = 1;
      state.whole_tensors = {{optim::kRowMoments, shard.moments[0].view(of_rows)},
                             {optim::kColumnMoments, shard.moments[1].view(of_columns)}};
    } else {
      state.tensors = {{optim::kMoments, shard.moments[0]}};
    }
    visit(state);
    if (access != StateAccess::kWrite) continue;
    shard.steps = state.steps;
    // A frozen parameter of which a file has no states is still without them.
    if (!had_moments && state.steps == 0) shard.moments.clear();
  }
}

}  // namespace zeropage::zero

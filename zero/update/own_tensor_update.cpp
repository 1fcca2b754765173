#include "zero/update/own_tensor_update.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>

#include <ATen/ops/zeros.h>

#include "optim/adopt_copy.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"
#include "zeropage/optimizer.h"

namespace zeropage::zero {
namespace {

// A tensor that a user's update was given as `before`.
void check_in_place(const char* who, const char* what, const at::Tensor& before,
                    const at::Tensor& after) {
  ZP_CHECK(after.sizes() == before.sizes() && after.strides() == before.strides() &&
               after.is_alias_of(before) && after.storage_offset() == before.storage_offset(),
           "a TensorUpdate of your own: ", who, ": expected ", what, " of sizes ", before.sizes(),
           " where they lie, got sizes ", after.sizes(),
           after.is_alias_of(before) ? "" : " elsewhere",
           "; write to them in place, by copy_() or mul_()");
}

std::vector<at::Tensor> aliases_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> aliases;
  for (const at::Tensor& tensor : tensors) aliases.push_back(tensor.alias());
  return aliases;
}

class OwnForm final : public optim::TensorForm {
 public:
  OwnForm(std::shared_ptr<const TensorUpdateBase> update, UpdateReads reads)
      : update_(std::move(update)), reads_(reads) {}

  double states(const Options& options, at::IntArrayRef /*sizes*/) const override {
    return static_cast<double>(update_->states_of(options).size());
  }
  bool can_leave() const override { return false; }
  UpdateReads reads(const Options& /*options*/) const override { return reads_; }
  std::string objection_to(const Options& /*options*/, at::IntArrayRef sizes) const override {
    return update_->objection_to(sizes);
  }
  // Nobody knows what it does: as many operations as Muon's.
  double cost(const Options& /*options*/, at::IntArrayRef sizes) const override {
    const int64_t numel = c10::multiply_integers(sizes);
    const int64_t rows = sizes.empty() ? 1 : sizes.front();
    return static_cast<double>(numel) * static_cast<double>(std::min(rows, numel / rows));
  }
  void transform(const Options& options, const at::Tensor& directions) const override {
    // A simulation's have no values for the user's code to read.
    if (directions.is_meta()) return;
    const at::Tensor given = directions.alias();
    update_->transform_any(options, directions);
    check_in_place("transform()", "directions", given, directions);
  }
  double factor(const Options& options, at::IntArrayRef sizes, const Sums& sums) const override {
    return update_->factor_any(options, sizes, std::sqrt(sums.values.value()),
                               std::sqrt(sums.directions.value()));
  }

 private:
  const std::shared_ptr<const TensorUpdateBase> update_;
  const UpdateReads reads_;
};

}  // namespace

}  // namespace zeropage::zero

namespace zeropage::detail {

std::shared_ptr<const zero::FusedForm> own_form(
    const std::shared_ptr<const TensorUpdateBase>& update, UpdateReads reads,
    const torch::optim::OptimizerOptions& defaults) {
  ZP_CHECK(reads == UpdateReads::kSums || reads == UpdateReads::kMatrix,
           "what a TensorUpdate of your own reads: expected UpdateReads::kSums or "
           "UpdateReads::kMatrix; an "
           "optimizer that reads elements alone is a class of torch::optim (zeropage/optimizer.h)");
  return std::make_shared<const zero::FusedForm>(
      zero::FusedForm{.make =
                          [update](zero::OwnedPart part) {
                            return std::make_unique<zero::OwnTensorUpdate>(std::move(part), update);
                          },
                      .states = static_cast<int64_t>(update->states_of(defaults).size()),
                      .tensors = std::make_shared<const zero::OwnForm>(update, reads)});
}

}  // namespace zeropage::detail

namespace zeropage::zero {

OwnTensorUpdate::OwnTensorUpdate(OwnedPart part, std::shared_ptr<const TensorUpdateBase> update)
    : part_(std::move(part)), update_(std::move(update)) {
  ZP_CHECK(part_.states == nullptr,
           "options.offload.optimizer: a TensorUpdate of your own keeps its states on the device; "
           "leave the option out");
  ZP_CHECK(
      !part_.remainders.defined(),
      "options.low_precision_update: a TensorUpdate of your own updates fp32 values, and split "
      "ones are none; use LowPrecisionUpdate::kMasterWeights");
}

void OwnTensorUpdate::add_groups(std::vector<OwnedGroup> groups) {
  for (OwnedGroup& group : groups) {
    for (const ParameterShard& shard : group.shards) {
      ZP_CHECK(shard.state_format == StateFormat::kFp32,
               "options.optimizer_state: a TensorUpdate of your own has states of fp32; leave the "
               "option out");
      if (shard.range.empty()) continue;
      shards_.push_back(
          {.parameter = shard.parameter, .group = options_.size(), .range = shard.range});
    }
    options_.push_back(std::move(group.options));
  }
}

void OwnTensorUpdate::make_states(Shard& shard) const {
  const std::vector<std::string> names = update_->states_of(*options_[shard.group]);
  const size_t wanted = names.size();
  ZP_CHECK(std::set(names.begin(), names.end()).size() == wanted &&
               (shard.names.empty() || names == shard.names),
           "a TensorUpdate of your own: states(): expected names that differ and stay, got ", names,
           shard.names.empty() ? "" : ", which were others before");
  shard.names = names;
  const memory::KindScope kind(memory::Kind::kOptimizerState);
  while (shard.states.size() < wanted) {
    shard.states.push_back(
        at::zeros({shard.range.numel()}, part_.values.options().dtype(at::kFloat)));
  }
}

void OwnTensorUpdate::make_directions(const at::Tensor& gradient, const HasGradient& has_gradient,
                                      const optim::GradientFactors& factors,
                                      const at::Tensor& directions,
                                      const std::function<void()>& on_values) {
  const auto of = [](const Shard& shard, const at::Tensor& flat) {
    return flat.narrow(0, shard.range.begin, shard.range.numel());
  };
  for (const Shard& shard : shards_) {
    if (!has_gradient(shard.parameter)) continue;
    if (part_.adopts_copy) optim::adopt_copy(of(shard, part_.values), of(shard, part_.copy_out));
    of(shard, directions).copy_(of(shard, part_.values));
  }
  on_values();
  for (Shard& shard : shards_) {
    if (!has_gradient(shard.parameter)) continue;
    make_states(shard);
    ++shard.steps;
    const TensorUpdateBase::Elements elements{
        .step = shard.steps,
        .values = of(shard, part_.values),
        .gradient = of(shard, gradient).to(at::kFloat).mul(factors.scale),
        .states = aliases_of(shard.states),
        .directions = of(shard, directions)};
    update_->direct_any(*options_[shard.group], elements);
    check_in_place("direct()", "directions", of(shard, directions), elements.directions);
    for (size_t index = 0; index < shard.states.size(); ++index) {
      check_in_place("direct()", "states", shard.states[index], elements.states[index]);
    }
  }
}

void OwnTensorUpdate::step(const at::Tensor& /*gradient*/, const HasGradient& has_gradient,
                           const optim::GradientFactors& /*factors*/,
                           const Directions& directions) {
  for (const Shard& shard : shards_) {
    if (!has_gradient(shard.parameter)) continue;
    const auto of = [&](const at::Tensor& flat) {
      return flat.narrow(0, shard.range.begin, shard.range.numel());
    };
    update_->descend_any(*options_[shard.group], of(part_.values),
                         of(directions.values).mul(directions.factor(shard.parameter)));
    if (part_.copy_out.defined()) of(part_.copy_out).copy_(of(part_.values));
  }
}

void OwnTensorUpdate::visit_states(StateAccess /*access*/, const VisitState& visit) {
  for (Shard& shard : shards_) {
    make_states(shard);
    const std::vector<std::string> names = update_->states_of(*options_[shard.group]);
    OwnedState state{.parameter = shard.parameter, .range = shard.range, .steps = shard.steps};
    for (size_t index = 0; index < names.size(); ++index) {
      state.tensors.push_back({names[index], shard.states[index]});
    }
    visit(state);
    shard.steps = state.steps;
  }
}

}  // namespace zeropage::zero

#include "tests/scripts/plain_side.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "tests/scripts/plain_rules.h"

namespace zeropage::scripts {
namespace {

int most_ranks(const Script& script) {
  int most = 1;
  for (const Setting& setting : script.settings) most = std::max(most, setting.shares());
  return most;
}

}  // namespace

PlainSide::PlainSide(const Script& script) : Side(script, script.settings.front()) {
  module_ = std::make_shared<ComposedModule>(
      script.units, script.seed, ComposedModule::masks_of(script.seed, most_ranks(script)));
  module_->to(torch::kDouble);
  module_->use_plain_operators();
  if (script.has_pipelines) module_->set_packs();
  const auto all = parameters();
  for (const torch::Tensor& parameter : all) average_.push_back(parameter.detach().clone());
  for (const auto& of_this : parameters_of_optimizers(script, all)) {
    optimizers_.push_back(with_rule(script.rule, [&]<typename A>(A*, const auto& options) {
      return std::unique_ptr<torch::optim::Optimizer>(
          std::make_unique<PlainClass<A>>(groups_of(script, of_this), options));
    }));
  }
}

Observations PlainSide::see_all() {
  size_t at = 0;
  while ((at = run(at)) < script_.actions.size()) {
    const auto which = static_cast<size_t>(script_.actions[at].which);
    setting_ = script_.settings[which % script_.settings.size()];
    // The average is not saved with the state.
    const auto all = parameters();
    for (size_t index = 0; index < all.size(); ++index) average_[index].copy_(all[index].detach());
    drop_schedules();
    // A saved state has no gradients.
    abandon();
    for (const auto& unit : module_->experts()) unit->forget_load();
    ++at;
  }
  return std::move(seen_);
}

template <typename Forward>
void PlainSide::on_each_rank(const Forward& forward) {
  std::vector<torch::Tensor> before, of_rank_0;
  for (const torch::Tensor& buffer : module_->buffers()) before.push_back(buffer.clone());
  const auto give = [&](const std::vector<torch::Tensor>& values) {
    const auto buffers = module_->buffers();
    for (size_t index = 0; index < buffers.size(); ++index) {
      buffers[index].variable_data().copy_(values[index]);
    }
  };
  for (int rank = 0; rank < setting_.shares(); ++rank) {
    if (rank > 0) give(before);
    forward(rank, sample_of(script_.seed, pass_, rank));
    if (rank > 0) continue;
    for (const torch::Tensor& buffer : module_->buffers()) of_rank_0.push_back(buffer.clone());
  }
  give(of_rank_0);
}

bool PlainSide::backward(const Action& action, bool /*syncs*/) {
  bool was_run = false;
  on_each_rank([&](int rank, const Sample& sample) {
    const torch::Tensor outputs =
        module_->forward(sample.x, sample.words, units_of(action), pass_, rank);
    const torch::Tensor loss = loss_of(outputs, sample) * action.value;
    if (!loss.requires_grad()) return;
    was_run = true;
    const torch::Tensor share = loss / setting_.shares();
    if (action.does == Does::kBackwardTwice) share.backward({}, /*retain_graph=*/true);
    share.backward();
  });
  return was_run;
}

void PlainSide::micro_batches(int count, int units) {
  for (int micro_batch = 0; micro_batch < count; ++micro_batch, ++pass_) {
    on_each_rank([&](int rank, const Sample& sample) {
      const torch::Tensor outputs = module_->forward(sample.x, sample.words, units, pass_, rank);
      const torch::Tensor loss = loss_of(outputs, sample) * factor_of(pass_, rank);
      const double weight = weight_of(pass_, rank);
      if (weight == 0) return;
      weight_ += weight;
      if (rank == 0) weight_of_0_ += weight;
      if (rank == 0) loss_of_0_ += weight * loss.item<double>();
      if (loss.requires_grad()) (loss * weight).backward();
    });
  }
}

torch::Tensor PlainSide::loss_of(const torch::Tensor& outputs, const Sample& sample) const {
  const torch::Tensor loss = torch::mse_loss(outputs, sample.target);
  const torch::Tensor of_balance = module_->auxiliary_loss();
  return of_balance.defined() ? loss + of_balance : loss;
}

void PlainSide::update_balance() {
  for (const auto& unit : module_->experts()) unit->update_balance(nullptr);
}

void PlainSide::look_at_mean() {
  if (std::exchange(is_mean_, true) || weight_ == 0) return;
  const torch::NoGradGuard no_grad;
  for (const torch::Tensor& parameter : parameters()) {
    if (parameter.grad().defined()) parameter.mutable_grad().div_(weight_);
  }
}

void PlainSide::accumulated_step() {
  const torch::NoGradGuard no_grad;
  look_at_mean();
  const auto all = parameters();
  const bool is_made =
      weight_ > 0 && std::all_of(all.begin(), all.end(), [](const auto& of) {
        return !of.grad().defined() || of.grad().isfinite().all().template item<bool>();
      });
  if (is_made) {
    const double most = script_.accumulation.clip_norm;
    const double unclipped = std::numeric_limits<double>::infinity();
    const double norm =
        torch::nn::utils::clip_grad_norm_(parameters(), most > 0 ? most : unclipped);
    if (script_.accumulation.clip_value > 0) {
      torch::nn::utils::clip_grad_value_(parameters(), script_.accumulation.clip_value);
    }
    see_step(is_made, norm);
    if (weight_of_0_ > 0) see("loss", torch::full({}, loss_of_0_ / weight_of_0_, torch::kDouble));
    step_optimizers();
  } else {
    see_step(is_made, 0);
  }
  abandon();
}

// One step late, a step is made with the gradients of the one before, and its own wait.
void PlainSide::step_optimizers() {
  if (when_of(script_) != StepWhen::kOneStepLate) return Side::step_optimizers();
  // Its options wait, too.
  std::vector<double> rates;
  for (auto& group : optimizers_.front()->param_groups()) rates.push_back(group.options().get_lr());
  std::swap(rates, late_rates_);
  const auto set_rates = [&](const std::vector<double>& to) {
    for (size_t index = 0; index < to.size(); ++index) {
      optimizers_.front()->param_groups()[index].options().set_lr(to[index]);
    }
  };
  set_rates(rates);
  const auto all = parameters();
  late_.resize(all.size());
  for (size_t index = 0; index < all.size(); ++index) {
    torch::Tensor of = all[index];
    const torch::Tensor now = of.grad().defined() ? of.grad().clone() : torch::Tensor();
    of.mutable_grad() = std::exchange(late_[index], now);
  }
  Side::step_optimizers();
  set_rates(late_rates_);
  for (size_t index = 0; index < all.size(); ++index) {
    torch::Tensor of = all[index];
    of.mutable_grad() = late_[index].defined() ? late_[index].clone() : torch::Tensor();
  }
}

void PlainSide::abandon() {
  module_->zero_grad();
  weight_ = weight_of_0_ = loss_of_0_ = 0;
  is_mean_ = false;
}

void PlainSide::throw_in_forward(int unit) {
  on_each_rank([&](int rank, const Sample& sample) {
    module_->throw_behind(unit);
    try {
      module_->forward(sample.x, sample.words, static_cast<int>(script_.units.size()), pass_, rank);
    } catch (const std::runtime_error&) {
    }
    module_->auxiliary_loss();
  });
}

torch::Tensor PlainSide::evaluate() {
  const torch::NoGradGuard no_grad;
  module_->eval();
  const Sample sample = sample_of(script_.seed + 1, pass_, 0);
  const torch::Tensor outputs = module_->forward(
      sample.x, sample.words, static_cast<int>(script_.units.size()), pass_, /*rank=*/0);
  module_->train();
  return outputs;
}

double PlainSide::clip(double most, bool /*by_torch*/) {
  return torch::nn::utils::clip_grad_norm_(parameters(), most);
}

void PlainSide::write_guarded(torch::Tensor parameter, double factor) {
  const torch::NoGradGuard no_grad;
  parameter.mul_(factor);
}

void PlainSide::average() {
  const torch::NoGradGuard no_grad;
  const auto all = parameters();
  for (size_t index = 0; index < all.size(); ++index) {
    average_[index].mul_(kDecay).add_(all[index], 1 - kDecay);
  }
}

torch::Tensor PlainSide::evaluate_average() {
  const torch::NoGradGuard no_grad;
  const auto all = parameters();
  std::vector<torch::Tensor> own;
  for (size_t index = 0; index < all.size(); ++index) {
    own.push_back(all[index].clone());
    all[index].variable_data().copy_(average_[index]);
  }
  const torch::Tensor outputs = evaluate();
  for (size_t index = 0; index < all.size(); ++index) {
    all[index].variable_data().copy_(own[index]);
  }
  return outputs;
}

void PlainSide::see_values() {
  for (const auto& item : module_->named_parameters()) see(item.key(), item.value());
  for (const auto& item : module_->named_buffers()) see(item.key(), item.value());
}

}  // namespace zeropage::scripts

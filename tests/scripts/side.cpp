#include "tests/scripts/side.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace zeropage::scripts {

std::vector<torch::Tensor> distinct(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> once;
  for (const torch::Tensor& tensor : tensors) {
    const bool known = std::any_of(once.begin(), once.end(),
                                   [&](const auto& other) { return other.is_same(tensor); });
    if (!known) once.push_back(tensor);
  }
  return once;
}

namespace {

// Two: what has columns is a matrix, and AdamW is for the rest.
void add_groups_of_muon(const std::vector<torch::Tensor>& parameters, double index,
                        std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::vector<torch::Tensor> matrices, others;
  for (const torch::Tensor& parameter : parameters) {
    (parameter.dim() >= 2 ? matrices : others).push_back(parameter);
  }
  const auto add = [&](std::vector<torch::Tensor>& members, const MuonOptions& options) {
    if (members.empty()) return;
    groups.emplace_back(members, std::make_unique<MuonOptions>(options));
  };
  const MuonOptions defaults =
      MuonOptions(0.02 / (1 + index)).weight_decay(0.1 * index).ns_eps(0.05).eps(0.05);
  add(matrices, MuonOptions(defaults).matrices(MuonMatrices::kFlattened).takes_embeddings(true));
  add(others, MuonOptions(defaults).rule(MuonRule::kAdamW));
}

}  // namespace

std::vector<torch::optim::OptimizerParamGroup> groups_of(
    const Script& script, const std::vector<torch::Tensor>& parameters) {
  std::vector<std::vector<torch::Tensor>> members(static_cast<size_t>(script.groups));
  for (size_t index = 0; index < parameters.size(); ++index) {
    members[index % members.size()].push_back(parameters[index]);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (size_t index = 0; index < members.size(); ++index) {
    if (members[index].empty()) continue;
    if (script.rule == Rule::kMuon) {
      add_groups_of_muon(members[index], static_cast<double>(index), groups);
      continue;
    }
    auto options = with_rule(script.rule, [&](auto*, auto options) {
      // A direction that is noise alone would be made as long as the value.
      const int decays = script.rule == Rule::kLamb ? 1 : 0;
      options.weight_decay(0.1 * static_cast<double>(decays + index));
      options.lr(options.lr() / static_cast<double>(1 + index));
      return std::unique_ptr<torch::optim::OptimizerOptions>(
          std::make_unique<decltype(options)>(options));
    });
    groups.emplace_back(members[index], std::move(options));
  }
  return groups;
}

namespace {

std::vector<torch::Tensor> of_optimizer(const Script& script,
                                        const std::vector<torch::Tensor>& parameters,
                                        int optimizer) {
  std::vector<torch::Tensor> of_this;
  for (auto index = static_cast<size_t>(optimizer); index < parameters.size();
       index += static_cast<size_t>(script.optimizers)) {
    of_this.push_back(parameters[index]);
  }
  return of_this;
}

// One stays in the optimizer.
std::ptrdiff_t left_out_among(const Script& script, const std::vector<torch::Tensor>& of_this) {
  return std::min<std::ptrdiff_t>(script.left_out,
                                  std::max<std::ptrdiff_t>(std::ssize(of_this) - 1, 0));
}

}  // namespace

std::vector<std::vector<torch::Tensor>> parameters_of_optimizers(
    const Script& script, const std::vector<torch::Tensor>& parameters) {
  std::vector<std::vector<torch::Tensor>> of_optimizers;
  for (int index = 0; index < script.optimizers; ++index) {
    of_optimizers.push_back(of_optimizer(script, parameters, index));
  }
  std::vector<torch::Tensor>& first = of_optimizers.front();
  first.erase(first.end() - left_out_among(script, first), first.end());
  return of_optimizers;
}

std::vector<torch::Tensor> left_out_of(const Script& script,
                                       const std::vector<torch::Tensor>& parameters) {
  const auto first = of_optimizer(script, parameters, 0);
  return {first.end() - left_out_among(script, first), first.end()};
}

void Side::add_group() {
  if (std::exchange(has_added_group_, true)) return;
  Script of_one_group = script_;
  of_one_group.groups = 1;
  const auto left_out = left_out_of(script_, parameters());
  for (const auto& group : groups_of(of_one_group, left_out)) {
    optimizers_.front()->add_param_group(group);
  }
}

void Side::see(const std::string& what, const torch::Tensor& value) {
  if (!value.defined()) return;
  seen_.push_back({"action " + std::to_string(at_) + ", " + what,
                   value.detach().to(torch::kCPU, torch::kDouble).clone()});
}

int Side::units_of(const Action& action) const {
  const auto all = static_cast<int>(script_.units.size());
  return action.which == 1 ? (all + 1) / 2 : all;
}

torch::Tensor Side::parameter(int which) const {
  const auto all = parameters();
  return all[static_cast<size_t>(which) % all.size()];
}

int Side::micro_batches_ahead() const {
  int count = 0;
  for (size_t at = at_; at < script_.actions.size(); ++at) {
    const Action& action = script_.actions[at];
    if (action.does == Does::kBackward) ++count;
    if (action.does == Does::kMicroBatches) count += action.which;
    if (action.does == Does::kStep || action.does == Does::kAbandon ||
        action.does == Does::kResume) {
      break;
    }
  }
  return count;
}

double Side::weight_of(int pass, int rank) const {
  return script_.accumulation.weighs ? 0.5 * ((pass * 3 + rank * 5 + 2) % 4) : 1;
}

double Side::factor_of(int pass, int rank) const {
  return pass == infinite_pass_ && rank == 0 ? std::numeric_limits<double>::infinity() : 1;
}

void Side::see_step(bool is_made, double norm) {
  see("whether the step was made", torch::full({}, is_made ? 1 : 0, torch::kDouble));
  if (is_made) see("norm of the mean", torch::full({}, norm, torch::kDouble));
}

void Side::step_optimizers() {
  for (auto& optimizer : optimizers_) optimizer->step();
}

void Side::schedule(const Action& action) {
  using namespace torch::optim;
  schedules_.resize(optimizers_.size());
  for (size_t index = 0; index < optimizers_.size(); ++index) {
    auto& [steps, plateau] = schedules_[index];
    if (action.which == 0) {
      if (!steps) steps = std::make_unique<StepLR>(*optimizers_[index], /*step_size=*/2, 0.5);
      steps->step();
    } else {
      if (!plateau) {
        plateau = std::make_unique<ReduceLROnPlateauScheduler>(
            *optimizers_[index], ReduceLROnPlateauScheduler::min, /*factor=*/0.5F, /*patience=*/0);
      }
      plateau->step(static_cast<float>(action.value));
    }
  }
}

void Side::step() {
  if (!script_.accumulation.is_on) {
    step_optimizers();
    update_balance();
  } else if (made_ > 0) {
    accumulated_step();
    update_balance();
    end_accumulation();
  }
  see_values();
}

void Side::end_accumulation() {
  made_ = 0;
  has_dropped_ = has_own_ = false;
}

size_t Side::run(size_t first) {
  // A run that resumes has no gradients of the one before.
  has_dropped_ = has_own_ = waits_for_average_ = false;
  for (at_ = first; at_ < script_.actions.size(); ++at_) {
    if (script_.actions[at_].does == Does::kResume) break;
    act(script_.actions[at_]);
  }
  see_values();
  return at_;
}

void Side::act(const Action& action) {
  const auto with_gradient = [&](const auto& change) {
    const torch::NoGradGuard no_grad;
    torch::Tensor of = parameter(action.which);
    if (of.grad().defined()) change(of);
  };
  switch (action.does) {
    case Does::kBackward:
    case Does::kBackwardNoSync:
    case Does::kBackwardTwice:
      if (script_.accumulation.is_on) {
        micro_batches(1, units_of(action));
        ++made_;
        return;
      }
      // Without one that averages, gradients stay each rank's own until the step.
      if (backward(action, action.does != Does::kBackwardNoSync)) {
        waits_for_average_ = action.does == Does::kBackwardNoSync;
      }
      ++pass_;
      return;
    case Does::kOwnLeftStep:
      if (is_odd_one()) return;
      [[fallthrough]];
    case Does::kStep:
      waits_for_average_ = false;
      return step();
    case Does::kMicroBatches:
      micro_batches(action.which, static_cast<int>(script_.units.size()));
      made_ += action.which;
      return;
    case Does::kAbandon:
      abandon();
      return end_accumulation();
    case Does::kInfinite:
      infinite_pass_ = pass_;
      return;
    case Does::kZeroGrad:
      has_dropped_ = has_own_ = waits_for_average_ = false;
      if (action.which < 2) {
        for (auto& optimizer : optimizers_) optimizer->zero_grad(action.which == 0);
      } else {
        module_->zero_grad(action.which == 2);
      }
      if (action.which % 2 == 0) after_zero_grad();
      return;
    case Does::kClip:
      if (made_ > 0) look_at_mean();
      // LibTorch's would take the norm of what is this rank's own.
      return see(
          "norm before it was clipped",
          torch::full({}, clip(action.value, action.which == 1 && !has_own_ && !waits_for_average_),
                      torch::kDouble));
    case Does::kReadNorm: {
      // Where ranks have slices or stages, a script sees the norm of its own.
      if (setting_.tensor > 1 || setting_.pipeline > 1 || has_own_ || waits_for_average_) return;
      if (made_ > 0) look_at_mean();
      torch::Tensor sum = torch::zeros({}, torch::kDouble);
      for (const torch::Tensor& of : parameters()) {
        if (of.grad().defined()) sum += of.grad().to(torch::kDouble).square().sum();
      }
      return see("norm", sum.sqrt());
    }
    case Does::kScaleGrad:
      return with_gradient([&](torch::Tensor& of) { of.mutable_grad().mul_(action.value); });
    case Does::kZeroOneGrad:
      return with_gradient([&](torch::Tensor& of) { of.mutable_grad().zero_(); });
    case Does::kDropGrad:
      has_dropped_ = true;
      return with_gradient([&](torch::Tensor& of) { of.mutable_grad() = torch::Tensor(); });
    case Does::kSetGrad: {
      torch::Tensor of = parameter(action.which);
      if (!of.requires_grad()) return;
      if (made_ > 0) look_at_mean();
      // One that no backward gave is each rank's own, and averaged; another was averaged before.
      const bool is_own = !of.grad().defined() && !has_dropped_;
      const double value = is_own ? own_value(action.value) : action.value;
      has_own_ = has_own_ || is_own;
      of.mutable_grad() = torch::full_like(of, value).detach();
      return;
    }
    case Does::kOwnLearningRate:
      if (!is_odd_one()) return;
      [[fallthrough]];
    case Does::kLearningRate:
      for (auto& optimizer : optimizers_) {
        auto& groups = optimizer->param_groups();
        if (groups.empty()) continue;
        auto& options = groups[static_cast<size_t>(action.which) % groups.size()].options();
        options.set_lr(options.get_lr() * action.value);
      }
      return;
    case Does::kSchedule:
      return schedule(action);
    case Does::kFreeze:
      parameter(action.which).requires_grad_(false);
      return;
    case Does::kUnfreeze:
      parameter(action.which).requires_grad_(true);
      return;
    case Does::kEvaluate:
      return see("outputs in evaluation", evaluate());
    case Does::kThrow:
      throw_in_forward(action.which % static_cast<int>(script_.units.size()));
      ++pass_;
      return;
    case Does::kWriteGuarded:
      return write_guarded(parameter(action.which), action.value);
    case Does::kOwnWrite:
      if (!is_odd_one()) return;
      [[fallthrough]];
    case Does::kWriteAlike:
      return write_alike(parameter(action.which), action.value);
    case Does::kAverage:
      return average();
    case Does::kSeeAverage:
      return see("outputs of the average", evaluate_average());
    case Does::kAddGroup:
      return add_group();
    case Does::kResume:
      return;
  }
}

}  // namespace zeropage::scripts

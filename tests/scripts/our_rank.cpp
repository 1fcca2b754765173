#include "tests/scripts/our_rank.h"

#include "tests/harness/autocast.h"
#include "zeropage/activation_offload.h"
#include "zeropage/context_parallel.h"

namespace zeropage::scripts {
namespace {

std::optional<torch::ScalarType> compute_dtype_of(Values values) {
  switch (values) {
    case Values::kDouble:
      return torch::kDouble;
    case Values::kFloat:
      return std::nullopt;
    case Values::kBFloat16:
      return torch::kBFloat16;
    case Values::kHalf:
      return torch::kHalf;
  }
  throw std::logic_error("no such dtype");
}

std::vector<std::string> frozen_of(const ComposedModule& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) {
    if (!item.value().requires_grad()) names.push_back(item.key());
  }
  return names;
}

}  // namespace

OurRank::OurRank(const Script& script, const Setting& setting, const Mesh& mesh)
    : Side(script, setting), mesh_(mesh) {}

void OurRank::begin(const Begin& begin, const ComposedModule::Masks& masks) {
  const auto place = static_cast<size_t>(rank());
  masks_.resize(masks.size());
  masks_[place] = at::Generator(masks[place]).clone();
  pass_ = begin.pass;
  wrap(begin.folder, begin);
  if (setting_.kept == Kept::kRegions) {
    module_->set_wrap([](const auto& unit, const torch::Tensor& x) { return checkpoint(unit, x); });
  }
  make_policy(begin.folder);
  if (!begin.state.empty()) load_state(begin.state, trained(), sharded());
  if (setting_.when == StepWhen::kOneStepLate) return;  // which has no average
  average_.emplace(model(), WeightAverageOptions{.decay = kDecay});
}

void OurRank::save(const std::string& path, const World& world) {
  if (!setting_.saves_aside) {
    save_state(path, trained(), sharded());
    return;
  }
  StateSaver saver(path, world);
  saver.save(trained(), sharded());
  train_on();
  saver.wait();
}

Begin OurRank::end(size_t action) const {
  return {
      .action = action, .pass = pass_, .frozen = frozen_of(*module_), .state = {}, .folder = {}};
}

void OurRank::leave_masks(ComposedModule::Masks& masks) const {
  const auto place = static_cast<size_t>(rank());
  const bool is_first =
      mesh_["tensor"].rank() == 0 && mesh_["pipeline"].rank() == 0 && mesh_["context"].rank() == 0;
  if (is_first) masks[place] = masks_[place];
}

std::shared_ptr<ComposedModule> OurRank::made(const Begin& begin) const {
  auto module = std::make_shared<ComposedModule>(script_.units, script_.seed, masks_);
  if (begin.frozen) {
    auto named = module->named_parameters();
    for (auto& item : named) item.value().requires_grad_(true);
    for (const std::string& name : *begin.frozen) named[name].requires_grad_(false);
  }
  if (script_.values == Values::kDouble) module->to(torch::kDouble);
  if (script_.has_pipelines) module->set_packs();
  return module;
}

Options OurRank::options_of(const std::string& folder) const {
  Options options;
  options.stage = stage_of(setting_.stage);
  options.page_bytes = setting_.page_bytes;
  options.compare_replicas = 1;
  options.shard_within = setting_.shard_within;
  options.compute_dtype = compute_dtype_of(script_.values);
  options.offload.optimizer = setting_.optimizer;
  options.offload.parameters = setting_.parameters;
  options.offload.step = setting_.when;
  if (options.offload.any()) options.offload.worker_threads = 1;
  options.offload.optimizer_bytes =
      setting_.offloaded_bytes > 0 ? setting_.offloaded_bytes : OffloadOptions::kAll;
  if (setting_.is_by_class) options.update_by = UpdateBy::kClass;
  options.reshard = setting_.stays;
  if (setting_.prefetch_bytes >= 0) options.prefetch_bytes = setting_.prefetch_bytes;
  options.minimum_sharded_bytes = setting_.minimum_sharded_bytes;
  options.secondary_shard_within = setting_.secondary_shard_within;
  options.optimizer_state = script_.states;
  if (script_.sends_floats) options.reduce_dtype = torch::kFloat;
  if (script_.keeps_low) options.accumulate_dtype = compute_dtype_of(script_.values);
  options.low_precision_update = script_.masters;
  options.world_invariant = script_.is_world_invariant;
  if (setting_.optimizer == Tier::kNvme || setting_.parameters == Tier::kNvme) {
    options.offload.nvme_directory = folder;
  }
  return options;
}

AccumulatorOptions OurRank::accumulator_options() const {
  const Accumulation& of_script = script_.accumulation;
  AccumulatorOptions options;
  options.reduce = setting_.reduced;
  options.gradient_budget_bytes = setting_.gradient_budget_bytes;
  if (of_script.clip_norm > 0) options.clip_norm = of_script.clip_norm;
  if (of_script.clip_value > 0) options.clip_value = of_script.clip_value;
  return options;
}

TensorParallelPlan OurRank::slices() const {
  TensorParallelPlan plan;
  for (size_t index = 0; index < script_.units.size(); ++index) {
    const Kind kind = script_.units[index].kind;
    if (kind != Kind::kMlp && kind != Kind::kTiled) continue;
    plan.emplace_back("u" + std::to_string(index) + "_up", Cut::column());
    plan.emplace_back("u" + std::to_string(index) + "_down", Cut::row());
  }
  return plan;
}

void OurRank::make_policy(const std::string& folder) {
  if (setting_.kept == Kept::kRecompute) {
    RecomputeOptions options = RecomputeOptions::selective();
    options.least_bytes = 0;
    policy_ = std::make_unique<Recompute>(options);
  }
  if (setting_.kept == Kept::kOnHost || setting_.kept == Kept::kOnNvme) {
    checkpointing::ActivationOffloadOptions options{.least_bytes = 64};
    if (setting_.kept == Kept::kOnNvme) {
      options.store = std::make_shared<NvmeActivations>(
          NvmeActivationsOptions{.directory = folder, .rank = mesh_.world().rank()});
    }
    policy_ = std::make_unique<checkpointing::ActivationOffload>(options);
  }
}

// A stage of a pipeline has the groups of all, of which some may be empty.
std::vector<ShardedOptimizer::Groups> OurRank::groups_of_optimizers() const {
  const auto all = parameters();
  std::vector<ShardedOptimizer::Groups> of_optimizers;
  for (const auto& of_this : parameters_of_optimizers(script_, all)) {
    auto groups = groups_of(script_, of_this);
    for (auto& group : groups) {
      std::erase_if(group.params(), [&](const auto& parameter) { return !has(parameter); });
    }
    of_optimizers.push_back(std::move(groups));
  }
  return of_optimizers;
}

Sample OurRank::sample(uint64_t seed, int number) const {
  Sample all = sample_of(seed, pass_, number);
  if (setting_.context == 1) return all;
  const auto own = [&](const torch::Tensor& rows) {
    return parallel::split_context(rows, 0, mesh_["context"]);
  };
  return {.x = own(all.x), .words = own(all.words), .target = own(all.target)};
}

torch::Tensor OurRank::of_all_rows(const torch::Tensor& own) const {
  return setting_.context == 1 ? own : parallel::gather_context(own, 0, mesh_["context"]);
}

torch::Tensor OurRank::forward_under(const std::function<torch::Tensor()>& forward) {
  std::optional<ActivationScope> scope;
  if (policy_) scope.emplace(*policy_);
  std::optional<testing::AutocastToBf16> autocast;
  if (script_.autocasts) autocast.emplace();
  return forward();
}

// The parameters' dtype is cast to by the wrapper.
torch::Tensor OurRank::of_dtype(const torch::Tensor& values) const {
  return script_.values == Values::kDouble ? values : values.to(torch::kFloat);
}

torch::Tensor OurRank::loss_of(const torch::Tensor& outputs, const Sample& sample) const {
  const torch::Tensor loss = torch::mse_loss(of_dtype(outputs), of_dtype(sample.target));
  // Forward, which is behind, has added it.
  const torch::Tensor of_balance = module_->auxiliary_loss();
  return of_balance.defined() ? loss + of_balance : loss;
}

void OurRank::accumulated_step() {
  torch::Tensor of_this = loss();
  // The mean over rows, of which all ranks have as many.
  if (setting_.context > 1 && of_this.defined()) {
    of_this = mesh_["context"].sum(of_this.detach().clone()) / setting_.context;
  }
  const StepReport report = step_all();
  see_step(report.stepped(), report.norm);
  // Another split has the losses of others on a rank.
  const bool has_other_split = script_.is_world_invariant && script_.beside == Beside::kTwin;
  if (report.stepped() && of_this.defined() && !has_other_split) see("loss", of_this);
}

void OurRank::update_balance() {
  for (const auto& unit : module_->experts()) {
    if (has(unit->layer()->router)) unit->update_balance(&mesh_.samples());
  }
}

double OurRank::clip(double most, bool by_torch) {
  if (by_torch) return torch::nn::utils::clip_grad_norm_(parameters(), most);
  return clip_grad_norm_(model(), most).before;
}

void OurRank::write_guarded(torch::Tensor parameter, double factor) {
  const GatheredParameters guard(model(), Modified::on_rank(0));
  const torch::NoGradGuard no_grad;
  if (rank() == 0 && has(parameter)) parameter.mul_(factor);
}

void OurRank::write_alike(torch::Tensor parameter, double factor) {
  const torch::NoGradGuard no_grad;
  if (has(parameter)) parameter.mul_(factor);
}

void OurRank::see_values() {
  for (const auto& item : values()) see(item.key(), item.value());
}

torch::Tensor OurRank::evaluate_average() {
  average_->swap_in();
  const torch::Tensor outputs = evaluate();
  average_->swap_out();
  return outputs;
}

}  // namespace zeropage::scripts

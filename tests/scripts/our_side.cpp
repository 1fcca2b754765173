#include "tests/scripts/our_side.h"

#include <optional>

#include "tests/harness/ranks.h"
#include "zero/zeropage.h"

namespace zeropage::scripts {
namespace {

Options options_of(const Setting& setting) {
  Options options;
  options.stage = stage_of(setting.stage);
  options.page_bytes = setting.page_bytes;
  options.shard_within = setting.shard_within;
  if (setting.is_double) options.compute_dtype = torch::kDouble;
  if (setting.is_offloaded) options.offload.optimizer = Tier::kHost;
  return options;
}

using Model = DistributedDataParallel<std::shared_ptr<ComposedModule>>;

std::vector<std::string> frozen_of(const ComposedModule& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) {
    if (!item.value().requires_grad()) names.push_back(item.key());
  }
  return names;
}

// One rank between two resumptions.
class OurSide final : public Side {
 public:
  struct Begin {
    size_t action = 0;
    int pass = 0;
    std::optional<std::vector<std::string>> frozen;  // unset: as the module is made
    std::string state;                               // to load; empty: none
  };

  OurSide(const Script& script, const Setting& setting, World& world)
      : Side(script, setting), mesh_(world, {{"data", setting.data}, {"tensor", setting.tensor}}) {}

  void begin(const Begin& begin, const ComposedModule::Masks& masks) {
    const auto place = static_cast<size_t>(rank());
    masks_.resize(masks.size());
    masks_[place] = at::Generator(masks[place]).clone();
    module_ = std::make_shared<ComposedModule>(script_.units, script_.seed, masks_);
    pass_ = begin.pass;
    if (begin.frozen) {
      auto named = module_->named_parameters();
      for (auto& item : named) item.value().requires_grad_(true);
      for (const std::string& name : *begin.frozen) named[name].requires_grad_(false);
    }
    if (setting_.is_double) module_->to(torch::kDouble);
    cut();
    if (setting_.kept == Kept::kRegions) {
      module_->set_wrap(
          [](const auto& unit, const torch::Tensor& x) { return checkpoint(unit, x); });
    }
    const Options options = options_of(setting_);
    if (setting_.tensor > 1) {
      model_.emplace(module_, mesh_, options);
    } else {
      model_.emplace(module_, mesh_["data"], options);
    }
    make_optimizers();
    if (!begin.state.empty()) load_state(begin.state, *model_, sharded());
    average_.emplace(*model_, WeightAverageOptions{.decay = kDecay});
  }

  void save(const std::string& path) { save_state(path, *model_, sharded()); }
  Begin end(size_t action) const {
    return {.action = action, .pass = pass_, .frozen = frozen_of(*module_), .state = {}};
  }
  void leave_masks(ComposedModule::Masks& masks) const {
    const auto place = static_cast<size_t>(rank());
    if (mesh_["tensor"].rank() == 0) masks[place] = masks_[place];
  }
  Observations take() { return std::move(seen_); }

 private:
  void cut() {
    if (setting_.tensor == 1) return;
    TensorParallelPlan plan;
    for (size_t index = 0; index < script_.units.size(); ++index) {
      if (script_.units[index].kind != Kind::kMlp) continue;
      plan.emplace_back("u" + std::to_string(index) + "_up", Cut::column());
      plan.emplace_back("u" + std::to_string(index) + "_down", Cut::row());
    }
    tensor_parallel(*module_, mesh_["tensor"], plan);
  }

  void make_optimizers() {
    const auto all = parameters();
    for (int index = 0; index < script_.optimizers; ++index) {
      std::vector<torch::Tensor> of_this;
      for (size_t i = static_cast<size_t>(index); i < all.size();
           i += static_cast<size_t>(script_.optimizers)) {
        of_this.push_back(all[i]);
      }
      optimizers_.push_back(with_rule(script_.rule, [&]<typename A>(A*, const auto& options) {
        return std::unique_ptr<torch::optim::Optimizer>(
            std::make_unique<Optimizer<A>>(*model_, groups_of(script_, of_this), options));
      }));
    }
  }
  ShardedOptimizer& sharded() { return dynamic_cast<ShardedOptimizer&>(*optimizers_.front()); }
  int rank() const { return mesh_["data"].rank(); }
  torch::Tensor of_dtype(const torch::Tensor& values) const {
    return setting_.is_double ? values : values.to(torch::kFloat);
  }

  torch::Tensor forward(const Sample& sample, int units) {
    std::optional<ActivationScope> scope;
    if (setting_.kept == Kept::kRecompute) scope.emplace(recompute_);
    return (*model_)(of_dtype(sample.x), sample.words, units, pass_, rank());
  }

  void backward(const Action& action, bool syncs) override {
    if (!syncs) {
      const NoSync no_sync = model_->no_sync();
      return backward(action, /*syncs=*/true);
    }
    const Sample sample = sample_of(script_.seed, pass_, rank());
    const torch::Tensor outputs = forward(sample, units_of(action));
    const torch::Tensor loss = torch::mse_loss(outputs, of_dtype(sample.target)) * action.value;
    if (loss.requires_grad()) loss.backward();
  }
  void throw_in_forward(int unit) override {
    module_->throw_behind(unit);
    try {
      forward(sample_of(script_.seed, pass_, rank()), static_cast<int>(script_.units.size()));
    } catch (const std::runtime_error& error) {
      if (std::string(error.what()) != "thrown on purpose") throw;
    }
  }
  torch::Tensor evaluate() override {
    const torch::NoGradGuard no_grad;
    model_->eval();
    const torch::Tensor outputs =
        forward(sample_of(script_.seed + 1, pass_, 0), static_cast<int>(script_.units.size()));
    model_->train();
    return outputs;
  }
  double clip(double most, bool by_torch) override {
    if (by_torch) return torch::nn::utils::clip_grad_norm_(parameters(), most);
    return clip_grad_norm_(*model_, most).before;
  }
  void write_guarded(torch::Tensor parameter, double factor) override {
    const GatheredParameters guard(*model_, Modified::on_rank(0));
    const torch::NoGradGuard no_grad;
    if (rank() == 0) parameter.mul_(factor);
  }
  void see_values() override {
    for (const auto& item : full_state(*model_)) see(item.key(), item.value());
  }
  void average() override { average_->update(); }
  torch::Tensor evaluate_average() override {
    average_->swap_in();
    const torch::Tensor outputs = evaluate();
    average_->swap_out();
    return outputs;
  }
  double own_value(double value) const override { return value * (1 + rank()); }
  bool is_odd_one() const override { return setting_.data > 1 && rank() + 1 == setting_.data; }

  const Mesh mesh_;
  ComposedModule::Masks masks_;
  Recompute recompute_{[] {
    RecomputeOptions options = RecomputeOptions::selective();
    options.least_bytes = 0;
    return options;
  }()};
  std::optional<Model> model_;
  std::optional<WeightAverage> average_;
};

}  // namespace

OurRun run_ours(const Script& script, const std::string& folder) {
  OurRun run;
  OurSide::Begin begin;
  Setting setting = script.settings.front();
  ComposedModule::Masks masks = ComposedModule::masks_of(script.seed, 4);
  while (true) {
    OurSide::Begin next;
    const auto errors = testing::try_ranks(setting.ranks(), [&](World& world) {
      OurSide side(script, setting, world);
      side.begin(begin, masks);
      const size_t at = side.run(begin.action);
      const bool goes_on = at < script.actions.size();
      const std::string state = folder + "/" + std::to_string(at);
      if (goes_on) side.save(state);
      side.leave_masks(masks);
      if (world.rank() != 0) return;
      next = side.end(at + 1);
      next.state = goes_on ? state : "";
      for (Observation& seen : side.take()) run.seen.push_back(std::move(seen));
    });
    for (const auto& error : errors) {
      if (error && run.error.empty()) run.error = testing::message_of(error);
    }
    if (!run.error.empty() || next.state.empty()) return run;
    const auto which = static_cast<size_t>(script.actions[next.action - 1].which);
    setting = script.settings[which % script.settings.size()];
    begin = std::move(next);
  }
}

}  // namespace zeropage::scripts

// A training script of a user, run twice: by LibTorch alone, and with this library. It is written once,
// against a Run: what differs between the two is behind it.
//
// LibTorch's run has the same ranks, each with a copy of the module, and averages gradients itself.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "tests/harness/autocast.h"
#include "tests/harness/mixed_precision_reference.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "zeropage/zeropage.h"

namespace zeropage::testing {

// How the script is run. Results of all but kHostOffload are LibTorch's, bit for bit.
enum class Mode {
  kFp32,
  kBf16,         // parameters in bfloat16, with fp32 master weights
  kAutocast,     // bfloat16 autocast over fp32 parameters
  kHostOffload,  // the optimizer's state on the host: the fused update, rounded otherwise
  kRecompute,    // activations are dropped and computed again
  // Pages of stage 3 stay through a step, small ones on every rank, and none is gathered ahead; or groups of two ranks have
  // them a second time.
  kHeldPages,
  kSecondaryShards,
};

struct Setting {
  int stage = 0;
  Mode mode = Mode::kFp32;
  int ranks = 2;
};

inline std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  constexpr const char* kModes[] = {"fp32",      "bf16",       "autocast",        "offload",
                                    "recompute", "held pages", "secondary shards"};
  return out << "stage " << setting.stage << ", " << kModes[static_cast<int>(setting.mode)] << ", "
             << setting.ranks << " ranks";
}

using Values = std::vector<torch::Tensor>;

inline std::vector<torch::Tensor> distinct(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> once;
  for (const torch::Tensor& tensor : tensors) {
    const bool known = std::any_of(once.begin(), once.end(),
                                   [&](const auto& other) { return other.is_same(tensor); });
    if (!known) once.push_back(tensor);
  }
  return once;
}

// ---- LibTorch alone ----

template <typename M>
class PlainModel {
 public:
  PlainModel(M module, bool is_bf16) : module_(std::move(module)), is_bf16_(is_bf16) {}

  template <typename... Arguments>
  auto operator()(Arguments&&... arguments) {
    return module_->forward(input(std::forward<Arguments>(arguments))...);
  }
  auto* operator->() { return &*module_; }
  M& module() { return module_; }
  std::vector<torch::Tensor> parameters() const { return module_->parameters(); }
  auto named_parameters() const { return module_->named_parameters(); }
  std::vector<torch::Tensor> buffers() const { return module_->buffers(); }
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }
  void zero_grad(bool set_to_none = true) { module_->zero_grad(set_to_none); }

 private:
  template <typename Argument>
  decltype(auto) input(Argument&& argument) const {
    if constexpr (std::is_same_v<std::remove_cvref_t<Argument>, torch::Tensor>) {
      const bool casts = is_bf16_ && argument.is_floating_point();
      return casts ? argument.to(torch::kBFloat16) : torch::Tensor(argument);
    } else {
      return std::forward<Argument>(argument);
    }
  }

  M module_;
  const bool is_bf16_;
};

// fp32 master weights around a torch::optim class. An element of a parameter that is no longer its
// master weight, rounded, was written to by the script: the master weight becomes it.
template <typename A>
class PlainMasters final : public torch::optim::Optimizer {
 public:
  template <typename Options>
  PlainMasters(const std::vector<torch::Tensor>& parameters,
               const std::vector<torch::Tensor>& masters, const Options& options)
      : Optimizer({torch::optim::OptimizerParamGroup(parameters)},
                  std::make_unique<Options>(options)),
        masters_(masters),
        update_(masters_, options) {}

  torch::Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    const auto& parameters = param_groups_[0].params();
    update_.param_groups()[0].set_options(param_groups_[0].options().clone());
    for (size_t i = 0; i < masters_.size(); ++i) {
      const torch::Tensor& low = parameters[i];
      masters_[i].mutable_grad() =
          low.grad().defined() ? low.grad().to(torch::kFloat) : torch::Tensor();
      if (!low.grad().defined()) continue;
      masters_[i].copy_(torch::where(masters_[i].to(low.scalar_type()) == low, masters_[i],
                                     low.to(torch::kFloat)));
    }
    update_.step();
    for (size_t i = 0; i < masters_.size(); ++i) {
      if (parameters[i].grad().defined()) torch::Tensor(parameters[i]).copy_(masters_[i]);
    }
    return {};
  }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}

 private:
  std::vector<torch::Tensor> masters_;
  A update_;
};

// Lives as an object that is used: what it stands for does its work at its end.
struct NoGuard {
  ~NoGuard() {}
};

class PlainRun {
 public:
  static constexpr bool kOurs = false;

  PlainRun(World& world, const Setting& setting) : world_(world), setting_(setting) {}

  int rank() const { return world_.rank(); }
  int ranks() const { return world_.size(); }
  const Setting& setting() const { return setting_; }

  template <typename M>
  PlainModel<M> wrap(M module) {
    const bool is_bf16 = setting_.mode == Mode::kBf16;
    for (const auto& parameter : distinct(module->parameters())) {
      masters_.emplace_back(parameter, parameter.detach().clone());
      if (is_bf16) {
        torch::Tensor low = parameter;
        low.set_data(parameter.detach().to(torch::kBFloat16));
      }
    }
    modules_.push_back(module.ptr());
    return {std::move(module), is_bf16};
  }

  template <typename A, typename Model, typename Options>
  std::unique_ptr<torch::optim::Optimizer> optimizer(Model& model, const Options& options) {
    return optimizer_of<A>(model, distinct(model.parameters()), options);
  }
  template <typename A, typename Model, typename Options>
  std::unique_ptr<torch::optim::Optimizer> optimizer_of(Model&,
                                                        const std::vector<torch::Tensor>& of,
                                                        const Options& options) {
    if (setting_.mode != Mode::kBf16) return std::make_unique<A>(of, options);
    std::vector<torch::Tensor> masters;
    for (const torch::Tensor& parameter : of) {
      for (const auto& [low, master] : masters_) {
        if (low.is_same(parameter)) masters.push_back(master);
      }
    }
    return std::make_unique<PlainMasters<A>>(of, masters, options);
  }

  template <typename Function>
  auto forward(const Function& function) {
    std::optional<AutocastToBf16> autocast;
    if (setting_.mode == Mode::kAutocast) autocast.emplace();
    return function();
  }
  // While it lives, backward averages nothing.
  auto no_sync(auto& /*model*/) {
    averages_ = false;
    return std::shared_ptr<void>(nullptr, [this](void*) { averages_ = true; });
  }
  void backward(const torch::Tensor& loss, const torch::Tensor& gradient = {},
                bool keep_graph = false) {
    loss.backward(gradient, keep_graph);
    end_backward();
  }
  // Runs so many backwards, and what is done with their mean before the step.
  template <typename Model, typename Loss, typename Change>
  void accumulate(Model& model, torch::optim::Optimizer& optimizer, int count, const Loss& loss,
                  const Change& change) {
    for (int micro = 0; micro < count; ++micro) {
      averages_ = micro + 1 == count;
      backward(loss(micro) / count);
    }
    change();
    optimizer.step();
    model.zero_grad();
  }
  // What DistributedDataParallel promises: the mean of what ranks have, zeros for those that have
  // nothing, and rank 0's buffers.
  void end_backward() {
    if (!averages_) return;
    const torch::NoGradGuard no_grad;
    for (const auto& module : modules_) {
      for (torch::Tensor parameter : distinct(module->parameters())) {
        const torch::Tensor has = torch::full({1}, parameter.grad().defined() ? 1.0F : 0.0F);
        world_.communicator().all_reduce(has, comm::ReduceOp::kMax, "who has it").wait();
        if (has.item<float>() == 0.0F) continue;
        torch::Tensor mean = parameter.grad().defined() ? parameter.grad().contiguous()
                                                        : torch::zeros_like(parameter);
        mean = mean.view({-1}).clone();
        world_.communicator().all_reduce(mean, comm::ReduceOp::kMean, "the mean").wait();
        parameter.mutable_grad() = mean.reshape(parameter.sizes()).clone();
      }
      if (!module->is_training()) continue;
      for (torch::Tensor buffer : module->buffers()) {
        torch::Tensor flat = buffer.reshape({-1}).clone();
        world_.communicator().broadcast(flat, 0, "a buffer").wait();
        buffer.variable_data().copy_(flat.view(buffer.sizes()));
      }
    }
  }

  template <typename Model>
  NoGuard gathered(Model&, const Modified&) {
    return {};
  }
  template <typename Model>
  double clip(Model& model, double most) {
    return torch::nn::utils::clip_grad_norm_(distinct(model.parameters()), most);
  }
  template <typename Model>
  Values values(Model& model) {
    Values all;
    for (const auto& parameter : model.parameters()) all.push_back(parameter.detach().clone());
    return all;
  }
  // In LibTorch's run every rank has what rank 0 has.
  template <typename Model>
  torch::Tensor parameter(Model&, const torch::Tensor& parameter) {
    return parameter;
  }

 private:
  World& world_;
  const Setting setting_;
  bool averages_ = true;
  std::vector<std::pair<torch::Tensor, torch::Tensor>> masters_;  // by parameter
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
};

// ---- with this library ----

class OurRun {
 public:
  static constexpr bool kOurs = true;

  OurRun(World& world, const Setting& setting) : world_(world), setting_(setting) {
    options.stage = stage_of(setting.stage);
    options.page_bytes = 4_KiB;
    options.compare_replicas = 1;
    if (setting.mode == Mode::kBf16) options.compute_dtype = torch::kBFloat16;
    if (setting.mode == Mode::kHeldPages) {
      options.reshard = Reshard::kAfterStep;
      options.minimum_sharded_bytes = 600;
      options.prefetch_bytes = 0;
    }
    if (setting.mode == Mode::kSecondaryShards) options.secondary_shard_within = 2;
    if (setting.mode == Mode::kHostOffload) {
      options.offload.optimizer = Tier::kHost;
    } else {
      options.update_by = UpdateBy::kClass;
    }
  }

  int rank() const { return world_.rank(); }
  int ranks() const { return world_.size(); }
  const Setting& setting() const { return setting_; }
  World& world() { return world_; }

  template <typename M>
  DistributedDataParallel<M> wrap(M module) {
    return {std::move(module), world_, options};
  }
  template <typename A, typename Model, typename AlgorithmOptions>
  std::unique_ptr<torch::optim::Optimizer> optimizer(Model& model,
                                                     const AlgorithmOptions& of_class) {
    return std::make_unique<Optimizer<A>>(model, of_class);
  }
  template <typename A, typename Model, typename AlgorithmOptions>
  std::unique_ptr<torch::optim::Optimizer> optimizer_of(Model& model,
                                                        const std::vector<torch::Tensor>& of,
                                                        const AlgorithmOptions& of_class) {
    return std::make_unique<Optimizer<A>>(
        model, ShardedOptimizer::Groups{torch::optim::OptimizerParamGroup(of)}, of_class);
  }

  template <typename Function>
  auto forward(const Function& function) {
    std::optional<AutocastToBf16> autocast;
    if (setting_.mode == Mode::kAutocast) autocast.emplace();
    std::optional<ActivationScope> scope;
    if (setting_.mode == Mode::kRecompute) {
      scope.emplace(recompute_);
    }
    return function();
  }
  auto no_sync(auto& model) { return model.no_sync(); }
  void backward(const torch::Tensor& loss, const torch::Tensor& gradient = {},
                bool keep_graph = false) {
    loss.backward(gradient, keep_graph);
  }
  void end_backward() {}
  template <typename Model, typename Loss, typename Change>
  void accumulate(Model& model, torch::optim::Optimizer& optimizer, int count, const Loss& loss,
                  const Change& change) {
    Accumulator accumulator(model, {.micro_steps = count});
    for (int micro = 0; micro < count; ++micro) accumulator.backward(loss(micro));
    change();
    accumulator.step(optimizer);
  }

  template <typename Model>
  auto gathered(Model& model, const Modified& modified) {
    return std::make_unique<GatheredParameters>(model, modified);
  }
  template <typename Model>
  double clip(Model& model, double most) {
    return clip_grad_norm_(model, most);
  }
  template <typename Model>
  Values values(Model& model) {
    const torch::NoGradGuard no_grad;
    const GatheredParameters guard(model);
    Values all;
    for (const auto& parameter : model.parameters()) all.push_back(parameter.detach().clone());
    return all;
  }

  Options options;

 private:
  World& world_;
  const Setting setting_;
  Recompute recompute_{[] {
    RecomputeOptions options = RecomputeOptions::selective();
    options.least_bytes = 0;
    return options;
  }()};
};

}  // namespace zeropage::testing

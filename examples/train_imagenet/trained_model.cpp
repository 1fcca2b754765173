#include "train_imagenet/trained_model.h"

#include <zeropage/adafactor.h>
#include <zeropage/batches.h>
#include <zeropage/lamb.h>

namespace train_imagenet {
namespace {

using zeropage::checkpointing::ActivationScope;
using zeropage::checkpointing::Recompute;
using zeropage::checkpointing::RecomputeOptions;
using Model = TrainedModel::Model;

zeropage::Options options_of(const ZeroKeys& zero) {
  zeropage::Options options;
  options.stage = zeropage::stage_of(static_cast<int>(zero.stage));
  options.compute_dtype = zero.dtype;
  options.offload.optimizer = zero.offload_optimizer;
  options.offload.parameters = zero.offload_parameters;
  options.offload.nvme_directory = zero.nvme_directory;
  return options;
}

zeropage::AccumulatorOptions accumulation_of(const TrainKeys& train) {
  zeropage::AccumulatorOptions options{.micro_steps = train.accumulation};
  if (train.clip_norm > 0) options.clip_norm = train.clip_norm;
  return options;
}

// Weights in one group, biases and norms in another, which may decay otherwise.
template <typename Algorithm, typename AlgorithmOptions>
std::unique_ptr<zeropage::ShardedOptimizer> optimizer_of(Model& model, const OptimizerKeys& keys,
                                                         const AlgorithmOptions& options) {
  std::vector<torch::Tensor> weights, vectors;
  for (const torch::Tensor& parameter : model.parameters()) {
    (parameter.dim() > 1 ? weights : vectors).push_back(parameter);
  }
  AlgorithmOptions for_vectors = options;
  for_vectors.weight_decay(keys.decay_vectors ? keys.weight_decay : 0);
  if constexpr (requires { for_vectors.trust_ratio(false); }) for_vectors.trust_ratio(false);
  zeropage::ShardedOptimizer::Groups groups;
  groups.emplace_back(weights, std::make_unique<AlgorithmOptions>(options));
  groups.emplace_back(vectors, std::make_unique<AlgorithmOptions>(for_vectors));
  return std::make_unique<zeropage::Optimizer<Algorithm>>(model, groups, options);
}

std::unique_ptr<zeropage::ShardedOptimizer> optimizer_of(Model& model, const OptimizerKeys& keys) {
  if (keys.name == OptimizerName::kSgd) {
    return optimizer_of<torch::optim::SGD>(model, keys,
                                           torch::optim::SGDOptions(keys.learning_rate)
                                               .momentum(keys.momentum)
                                               .nesterov(keys.nesterov)
                                               .weight_decay(keys.weight_decay));
  }
  if (keys.name == OptimizerName::kLamb) {
    return optimizer_of<zeropage::Lamb>(model, keys,
                                        zeropage::LambOptions(keys.learning_rate)
                                            .betas({keys.betas.at(0), keys.betas.at(1)})
                                            .weight_decay(keys.weight_decay));
  }
  if (keys.name == OptimizerName::kAdafactor) {
    return optimizer_of<zeropage::Adafactor>(
        model, keys,
        zeropage::AdafactorOptions(keys.learning_rate).weight_decay(keys.weight_decay));
  }
  return optimizer_of<torch::optim::AdamW>(model, keys,
                                           torch::optim::AdamWOptions(keys.learning_rate)
                                               .betas({keys.betas.at(0), keys.betas.at(1)})
                                               .weight_decay(keys.weight_decay));
}

std::unique_ptr<zeropage::WeightAverage> average_of(Model& model, const TrainKeys& train) {
  if (train.average_decay == 0) return nullptr;
  return std::make_unique<zeropage::WeightAverage>(
      model, zeropage::WeightAverageOptions{.decay = train.average_decay});
}

std::optional<Recompute> recompute_of(const Model& model, const ZeroKeys& zero) {
  if (zero.recompute == RecomputePolicy::kNone) return std::nullopt;
  RecomputeOptions options = zero.recompute == RecomputePolicy::kBudget
                                 ? RecomputeOptions::budget(zero.recompute_budget)
                                 : RecomputeOptions::selective();
  return zeropage::recompute(model, std::move(options));
}

}  // namespace

TrainedModel::TrainedModel(const Config& config, const Network& network,
                           const zeropage::World& world)
    : device_(world.device()),
      model_(network.module, world, options_of(config.zero)),
      optimizer_(optimizer_of(model_, config.optimizer)),
      accumulator_(model_, accumulation_of(config.train)),
      average_(average_of(model_, config.train)),
      recompute_(recompute_of(model_, config.zero)),
      criterion_({config.train.label_smoothing, config.train.mixup}),
      micro_steps_(config.train.accumulation),
      note_(network.note) {
  if (!config.zero.offload_activations) return;
  offload_.emplace(zeropage::checkpointing::ActivationOffloadOptions{});
  offload_->stay_here(model_.parameters());
  offload_->stay_here(model_.buffers());
}

zeropage::StepReport TrainedModel::step(const StepInput& input, Score& score) {
  for (auto& group : optimizer_->param_groups()) group.options().set_lr(input.learning_rate);
  const double share = criterion_.draw_share(input.random);
  for (const auto& micro : zeropage::accumulate::micro_batches(input.batch, micro_steps_)) {
    micro_step(micro, share, score);
  }
  zeropage::StepReport report = accumulator_.step(*optimizer_);
  if (average_ && report.stepped()) average_->update();
  return report;
}

void TrainedModel::micro_step(const zeropage::data::PrefetchingLoader::Batch& batch, double share,
                              Score& score) {
  const torch::Tensor labels = batch.target.to(device_);
  const torch::Tensor images = Criterion::mix(batch.data.to(device_), share);
  torch::Tensor outputs, loss;
  {
    std::optional<ActivationScope> dropping, leaving;
    if (recompute_) dropping.emplace(*recompute_);
    if (offload_) leaving.emplace(*offload_);
    outputs = model_(images).to(torch::kFloat);
    loss = criterion_(outputs, labels, share);
  }
  accumulator_.backward(loss);
  score.add(outputs.detach(), labels);
}

bool TrainedModel::is_finite(const zeropage::World& world) const {
  const torch::NoGradGuard no_grad;
  bool all = true;
  for (const torch::Tensor& parameter : model_.parameters()) {
    all &= parameter.isfinite().all().item<bool>();
  }
  for (const torch::Tensor& buffer : model_.buffers()) all &= buffer.isfinite().all().item<bool>();
  return world.sum(all ? 0.0 : 1.0) == 0;
}

torch::Tensor TrainedModel::outputs(const torch::Tensor& images) {
  const torch::NoGradGuard no_grad;
  return model_(images.to(device_)).to(torch::kFloat);
}

}  // namespace train_imagenet

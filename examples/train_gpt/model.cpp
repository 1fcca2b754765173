#include "examples/train_gpt/model.h"

namespace train_gpt {
namespace {

Gpt moved(Gpt gpt, torch::Device device) {
  gpt->to(device);
  return gpt;
}

zeropage::Reshard reshard_of(const std::string& flag) {
  if (flag == "step") return zeropage::Reshard::kAfterStep;
  return flag == "backward" ? zeropage::Reshard::kAfterBackward : zeropage::Reshard::kAfterUse;
}

zeropage::LowPrecisionUpdate update_of(const std::string& flag) {
  using zeropage::LowPrecisionUpdate;
  if (flag == "master") return LowPrecisionUpdate::kMasterWeights;
  if (flag == "split") return LowPrecisionUpdate::kSplitMasterWeights;
  return flag == "stochastic" ? LowPrecisionUpdate::kStochasticRounding
                              : LowPrecisionUpdate::kNearest;
}

zeropage::ReduceMicroSteps reduce_of(const std::string& flag) {
  using zeropage::ReduceMicroSteps;
  if (flag == "auto") return ReduceMicroSteps::kAuto;
  return flag == "each" ? ReduceMicroSteps::kEach : ReduceMicroSteps::kOnce;
}

}  // namespace

zeropage::AccumulatorOptions accumulator_options(const Flags& flags) {
  zeropage::AccumulatorOptions options;
  options.micro_steps = flags.accumulate;
  options.reduce = reduce_of(flags.reduce_micro_steps);
  options.gradient_budget_bytes = flags.gradient_budget_bytes;
  if (flags.clip_norm > 0) options.clip_norm = flags.clip_norm;
  if (flags.spike_z > 0) options.norm_spikes.emplace().z_score = flags.spike_z;
  if (flags.precision.loss_scale != "auto") {
    options.loss_scaler =
        zeropage::accumulate::LossScalerOptions::fixed(std::stod(flags.precision.loss_scale));
  }
  return options;
}

Model make_model(const zeropage::comm::World& world, const Flags& flags) {
  zeropage::Options options;
  options.stage = zeropage::stage_of(flags.stage);
  options.page_bytes = flags.page_bytes;
  options.parameter_budget_bytes = flags.parameter_budget_bytes;
  if (!flags.prefetch) options.prefetch_bytes = 0;
  options.reshard = reshard_of(flags.reshard);
  options.world_invariant = flags.world_invariant;
  options.offload = flags.offload.options();
  options.optimizer_state = flags.optimizer_state();
  options.rounding_seed = flags.seed;
  if (flags.dtype() != torch::kFloat32) {
    options.compute_dtype = flags.dtype();
    options.reduce_dtype = flags.reduce_dtype();
    options.accumulate_dtype = flags.accumulate_dtype();
    options.low_precision_update = update_of(flags.precision.update);
    if (!flags.precision.keep_fp32.empty()) {
      options.stays_fp32 = zeropage::ModuleSelection::named({flags.precision.keep_fp32});
    }
  }
  const auto construct = [&] { return Gpt(flags.model, flags.seed); };
  Model model = flags.constructs_deferred()
                    ? Model(zeropage::DeferredModule<Gpt>(construct), world, options)
                    : Model(moved(construct(), world.device()), world, options);
  model->run_blocks_by(block_loop(flags.checkpointing));
  // The weights are drawn; from here on each rank draws its own masks. Where none are drawn, what a
  // state has of the generators shall not depend on how the model was constructed.
  const auto stream = static_cast<uint64_t>(flags.model.dropout > 0 ? world.rank() : 0);
  torch::manual_seed(splitmix64(splitmix64(flags.seed) + stream));
  return model;
}

std::unique_ptr<zeropage::ShardedOptimizer> make_optimizer(const Flags& flags, Model& model) {
  using namespace torch::optim;
  using zeropage::Optimizer;
  if (flags.optimizer == "adamw") {
    return std::make_unique<Optimizer<AdamW>>(model, AdamWOptions(flags.lr));
  }
  if (flags.optimizer == "adam") {
    return std::make_unique<Optimizer<Adam>>(model, AdamOptions(flags.lr));
  }
  if (flags.optimizer == "sgd") {
    return std::make_unique<Optimizer<SGD>>(model, SGDOptions(flags.lr));
  }
  if (flags.optimizer == "lion") {
    return std::make_unique<Optimizer<zeropage::Lion>>(model, zeropage::LionOptions(flags.lr));
  }
  TORCH_INTERNAL_ASSERT(flags.optimizer == "adagrad");
  return std::make_unique<Optimizer<Adagrad>>(model, AdagradOptions(flags.lr));
}

torch::Tensor loss_of(Model& model, const Batch& batch) {
  return next_token_loss(model(batch.inputs), batch.targets);
}

double mean_over_ranks(const zeropage::comm::World& world, double value) {
  const auto tensor = torch::full({1}, value, torch::kFloat64);
  world.communicator().all_reduce(tensor, zeropage::comm::ReduceOp::kMean, "the loss").wait();
  return tensor.item<double>();
}

}  // namespace train_gpt

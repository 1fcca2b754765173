#include "examples/train_gpt/model.h"

namespace train_gpt {
namespace {

zeropage::TensorParallelPlan slices_of_layers(const GptConfig& config) {
  using zeropage::Cut;
  const int64_t head = config.d_model / config.heads;
  return {{"blocks.*.attention_qkv", Cut::column().parts(3).unit(head)},
          {"blocks.*.attention_out", Cut::row().unit(head)},
          {"blocks.*.mlp_up", Cut::column()},
          {"blocks.*.mlp_down", Cut::row()},
          {"token_embedding", Cut::vocabulary()}};
}

Gpt moved(Gpt gpt, torch::Device device) {
  gpt->to(device);
  return gpt;
}

}  // namespace

int64_t parameters_of(const GptConfig& config) {
  const int64_t d = config.d_model;
  constexpr int64_t kSquaresOfABlock = 12;  // 3 and 1 of attention, 4 and 4 of the MLP
  constexpr int64_t kVectorsOfABlock = 13;  // their biases 3, 1, 4, 1, and two norms
  return config.layers * (kSquaresOfABlock * d * d + kVectorsOfABlock * d) +
         (kVocabulary + config.sequence) * d + 2 * d;
}

Model make_model(const Places& places, const Flags& flags) {
  const zeropage::World& world = places.data;
  const auto construct = [&] { return Gpt(flags.model, flags.seed); };
  const auto wrapped = [&](auto module, const Gpt& gpt) -> Model {
    if (!places.mesh) return {std::move(module), world, flags.options};
    zeropage::tensor_parallel(gpt, (*places.mesh)["tensor"], slices_of_layers(flags.model));
    return {std::move(module), *places.mesh, flags.options};
  };
  const auto wrap = [&] {
    if (flags.constructs_deferred()) {
      zeropage::DeferredModule<Gpt> deferred(construct);
      const Gpt gpt = deferred.module();
      return wrapped(std::move(deferred), gpt);
    }
    const Gpt gpt = moved(construct(), world.device());
    return wrapped(gpt, gpt);
  };
  Model model = wrap();
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

Batch batch_without_values(const Flags& flags) {
  const auto options = torch::TensorOptions().dtype(torch::kInt64).device(torch::kMeta);
  const std::vector<int64_t> sizes = {flags.batch, flags.model.sequence};
  return {torch::empty(sizes, options), torch::empty(sizes, options)};
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

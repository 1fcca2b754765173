#include "examples/train_gpt/model.h"

namespace train_gpt {
namespace {

Gpt moved(Gpt gpt, torch::Device device) {
  gpt->to(device);
  return gpt;
}

}  // namespace

Model make_model(const zeropage::comm::World& world, const Flags& flags) {
  zeropage::Options options;
  options.stage = zeropage::stage_of(flags.stage);
  options.page_bytes = flags.page_bytes;
  options.parameter_budget_bytes = flags.parameter_budget_bytes;
  if (!flags.prefetch) options.prefetch_bytes = 0;
  options.master_weights = flags.dtype() != torch::kFloat32;
  const auto construct = [&] {
    Gpt gpt(flags.model, flags.seed);
    gpt->to(flags.dtype());
    return gpt;
  };
  return flags.constructs_deferred()
             ? Model(zeropage::DeferredModule<Gpt>(construct), world, options)
             : Model(moved(construct(), world.device()), world, options);
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Flags& flags, Model& model) {
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

torch::Tensor train_on(const Batch& batch, Model& model, torch::optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  const auto loss = loss_of(model, batch);
  loss.backward();
  optimizer.step();
  return loss;
}

double mean_over_ranks(const zeropage::comm::World& world, double value) {
  const auto tensor = torch::full({1}, value, torch::kFloat64);
  world.communicator().all_reduce(tensor, zeropage::comm::ReduceOp::kMean, "the loss").wait();
  return tensor.item<double>();
}

}  // namespace train_gpt

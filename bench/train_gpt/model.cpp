#include "bench/train_gpt/model.h"

#include "bench/train_gpt/expert_layers.h"
#include "zeropage/adafactor.h"
#include "zeropage/context_parallel.h"
#include "zeropage/lamb.h"
#include "zeropage/muon.h"
#include "zeropage/tiled.h"

namespace train_gpt {
namespace {

// has_embedding: whether the module has the tokens', as a stage may not.
zeropage::TensorParallelPlan slices_of_layers(const GptConfig& config, bool has_embedding) {
  using zeropage::Cut;
  const int64_t head = config.d_model / config.heads;
  zeropage::TensorParallelPlan plan = {
      {"blocks.*.attention_qkv", Cut::column().parts(3).unit(head)},
      {"blocks.*.attention_out", Cut::row().unit(head)},
      {"blocks.*.mlp_up", Cut::column()},
      {"blocks.*.mlp_down", Cut::row()}};
  if (has_embedding) plan.emplace_back("token_embedding", Cut::vocabulary());
  return plan;
}

// From here on each rank draws its own masks, but for those that compute the same samples. Where none are drawn, what
// a state has of the generators shall not depend on how the model was constructed.
void seed_masks(const Places& places, const Flags& flags) {
  const zeropage::World* const stages = places.along("pipeline");
  const int rank =
      (stages == nullptr ? 0 : stages->rank() * places.samples.size()) + places.samples.rank();
  const auto stream = static_cast<uint64_t>(flags.model.dropout > 0 ? rank : 0);
  torch::manual_seed(splitmix64(splitmix64(flags.seed) + stream));
}

// The embeddings, a layer of blocks for each stage, and the head.
zeropage::PipelineLayers layers_of_stages(Gpt& gpt, const Flags& flags) {
  const auto children = gpt->named_children();
  const auto& blocks = children["blocks"];
  const int64_t stages = flags.pipeline * flags.chunks_of_rank();
  zeropage::PipelineLayers layers = {
      {"embeddings",
       {children["token_embedding"], children["position_embedding"]},
       [gpt](const torch::Tensor& tokens) mutable { return gpt->embed(tokens); }}};
  const BlockLoop loop = block_loop(flags.checkpointing);
  for (int64_t stage = 0; stage < stages; ++stage) {
    const int64_t first = stage * flags.model.layers / stages;
    const int64_t end = (stage + 1) * flags.model.layers / stages;
    zeropage::PipelineLayer layer{.name = c10::str("blocks ", first, " to ", end - 1)};
    torch::nn::ModuleList of_stage;
    for (int64_t block = first; block < end; ++block) {
      layer.modules.push_back(blocks->named_children()[std::to_string(block)]);
      of_stage->push_back(layer.modules.back());
    }
    layer.forward = [of_stage, loop](const torch::Tensor& input) {
      if (loop) return loop(of_stage, input);
      torch::Tensor x = input;
      for (const auto& block : *of_stage) x = block->as<Block>()->forward(x);
      return x;
    };
    layers.push_back(std::move(layer));
  }
  layers.push_back(
      {"head",
       {children["final_norm"], children[flags.model.untied_head ? "head" : "token_embedding"]},
       [gpt](const torch::Tensor& x) mutable { return gpt->logits(x); }});
  return layers;
}

Gpt construct_on(torch::Device device, const std::function<Gpt()>& construct) {
  // The values of a simulated model are needed by nobody, and would take memory of the host.
  if (device.is_meta()) return zeropage::DeferredModule<Gpt>(construct).module();
  Gpt gpt = construct();
  gpt->to(device);
  return gpt;
}

// Blocks' matrices by Muon, query, key and value apart; all else by AdamW. Updates are as large as AdamW's, so that one rate is
// for both.
template <typename Wrapped>
zeropage::ShardedOptimizer::Groups muon_groups(const Flags& flags, const Wrapped& model) {
  using zeropage::MuonOptions;
  std::vector<torch::Tensor> fused;
  std::vector<torch::Tensor> matrices;
  std::vector<torch::Tensor> others;
  for (const auto& named : model.named_parameters()) {
    const bool is_of_block = named.key().starts_with("blocks.") && named.value().dim() == 2;
    const bool is_fused = named.key().find("attention_qkv") != std::string::npos;
    (!is_of_block ? others : is_fused ? fused : matrices).push_back(named.value());
  }
  // Names say that these are no embeddings, whatever sizes they have.
  const MuonOptions muon =
      MuonOptions(flags.lr).scale(zeropage::MuonScale::kMatchRmsAdamW).takes_embeddings(true);
  zeropage::ShardedOptimizer::Groups groups;
  const auto add = [&](const std::vector<torch::Tensor>& parameters, const MuonOptions& options) {
    if (parameters.empty()) return;
    groups.emplace_back(parameters, std::make_unique<MuonOptions>(options));
  };
  add(fused, MuonOptions(muon).row_blocks({flags.model.d_model}));
  add(matrices, muon);
  add(others, MuonOptions::adamw(flags.lr));
  return groups;
}

template <typename Wrapped>
std::unique_ptr<zeropage::ShardedOptimizer> optimizer_of(const Flags& flags, Wrapped& model) {
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
  if (flags.optimizer == "muon") {
    return std::make_unique<Optimizer<zeropage::Muon>>(model, muon_groups(flags, model));
  }
  if (flags.optimizer == "lamb") {
    return std::make_unique<Optimizer<zeropage::Lamb>>(model, zeropage::LambOptions(flags.lr));
  }
  if (flags.optimizer == "adafactor") {
    return std::make_unique<Optimizer<zeropage::Adafactor>>(model,
                                                            zeropage::AdafactorOptions(flags.lr));
  }
  TORCH_INTERNAL_ASSERT(flags.optimizer == "adagrad");
  return std::make_unique<Optimizer<Adagrad>>(model, AdagradOptions(flags.lr));
}

}  // namespace

namespace {

// Elements of a model whose tokens meet so many experts of each block.
int64_t parameters_with(const Flags& flags, int64_t experts) {
  const GptConfig& config = flags.model;
  const int64_t d = config.d_model;
  constexpr int64_t kSquaresOfABlock = 12;  // 3 and 1 of attention, 4 and 4 of the MLP
  constexpr int64_t kVectorsOfABlock = 13;  // their biases 3, 1, 4, 1, and two norms
  constexpr int64_t kSquaresOfAnMlp = 8, kVectorsOfAnMlp = 5;
  int64_t numel = config.layers * (kSquaresOfABlock * d * d + kVectorsOfABlock * d) +
                  (kVocabulary + config.sequence) * d + 2 * d +
                  (config.untied_head ? kVocabulary * d : 0);
  if (flags.experts.any()) {
    numel -= config.layers * (kSquaresOfAnMlp * d * d + kVectorsOfAnMlp * d);
    numel += parameters_of_experts(flags, experts);
  }
  return numel;
}

}  // namespace

int64_t parameters_of(const Flags& flags) {
  return parameters_with(flags, flags.experts.experts);
}

int64_t active_parameters_of(const Flags& flags) {
  return parameters_with(flags, flags.experts.active);
}

zeropage::parallel::ContextForm context_form_of(const Flags& flags) {
  using zeropage::parallel::ContextForm;
  return flags.context_form == "ulysses" ? ContextForm::kUlysses : ContextForm::kRing;
}

Gpt construct_gpt(const Flags& flags) {
  Gpt gpt(flags.model, flags.seed, make_experts(flags));
  if (flags.checkpointing.tiles_mlps) {
    gpt->run_mlps_by([](const torch::nn::ModuleList& layers, const torch::Tensor& x,
                        const std::function<torch::Tensor(const torch::Tensor&)>& mlp) {
      return zeropage::tiled(*layers, x, mlp, {.name = "--tiled-mlp"});
    });
  }
  return gpt;
}

MadeModel make_model(const Places& places, const Flags& flags) {
  const zeropage::World& world = places.samples;
  const auto construct = [&] { return construct_gpt(flags); };
  std::vector<zeropage::PlacedExperts> experts;
  const auto wrapped = [&](auto module, const Gpt& gpt) -> Model {
    if (!places.mesh) return {std::move(module), world, flags.options};
    experts = place_experts(gpt, places, flags);
    if (const zeropage::World* const slices = places.along("tensor")) {
      zeropage::tensor_parallel(gpt, *slices,
                                slices_of_layers(flags.model, /*has_embedding=*/true));
    }
    if (const zeropage::World* const context = places.along("context")) {
      zeropage::parallel::context_parallel(gpt, *context, context_form_of(flags));
      gpt.ptr()->set_positions(
          zeropage::parallel::context_positions(flags.model.sequence, *context, world.device()));
    }
    return {std::move(module), *places.mesh, flags.options};
  };
  const auto wrap = [&] {
    if (flags.constructs_deferred()) {
      zeropage::DeferredModule<Gpt> deferred(construct);
      const Gpt gpt = deferred.module();
      return wrapped(std::move(deferred), gpt);
    }
    const Gpt gpt = construct_on(world.device(), construct);
    return wrapped(gpt, gpt);
  };
  auto model = std::make_unique<Model>(wrap());
  (*model)->run_blocks_by(block_loop(flags.checkpointing));
  seed_masks(places, flags);
  return {std::move(model), std::move(experts)};
}

zeropage::Pipeline::Model make_stages(const Places& places, const Flags& flags) {
  std::vector<int64_t> first_layers = {0};
  const int64_t stages = flags.pipeline * flags.chunks_of_rank();
  for (int64_t stage = 1; stage < stages; ++stage) first_layers.push_back(1 + stage);
  const auto stage = zeropage::pipeline_stage<Gpt>(
      [&] { return construct_gpt(flags); }, [&](Gpt& gpt) { return layers_of_stages(gpt, flags); },
      (*places.mesh)["pipeline"], {.chunks = flags.chunks_of_rank(), .first_layers = first_layers});
  if (const zeropage::World* const slices = places.along("tensor")) {
    const bool has_embedding = stage->named_children().contains("token_embedding");
    zeropage::tensor_parallel(*stage, *slices, slices_of_layers(flags.model, has_embedding));
  }
  zeropage::Pipeline::Model model(stage, *places.mesh, flags.options);
  seed_masks(places, flags);
  return model;
}

std::unique_ptr<zeropage::ShardedOptimizer> make_optimizer(const Flags& flags, Model& model) {
  return optimizer_of(flags, model);
}

std::unique_ptr<zeropage::ShardedOptimizer> make_optimizer(const Flags& flags,
                                                           zeropage::Pipeline::Model& model) {
  return optimizer_of(flags, model);
}

Batch batch_without_values(const Flags& flags) {
  const auto options = torch::TensorOptions().dtype(torch::kInt64).device(torch::kMeta);
  const std::vector<int64_t> sizes = {flags.batch, flags.model.sequence};
  return {torch::empty(sizes, options), torch::empty(sizes, options)};
}

torch::Tensor loss_of(Model& model, const Batch& batch) {
  return next_token_loss(model(batch.inputs), batch.targets);
}

torch::Tensor training_loss_of(Model& model, const Batch& batch) {
  torch::Tensor loss = loss_of(model, batch);
  for (const auto& layer : layers_of_experts(*model.module())) {
    loss = loss + layer->auxiliary_loss();
  }
  return loss;
}

double mean_over_ranks(const zeropage::comm::World& world, double value) {
  const auto tensor = torch::full({1}, value, torch::kFloat64);
  world.communicator().all_reduce(tensor, zeropage::comm::ReduceOp::kMean, "the loss").wait();
  return tensor.item<double>();
}

}  // namespace train_gpt

// A language model: a plain LibTorch module, whose parameters have Hugging Face's names.
//
//   const auto model = make_model(read_config("config.json"), {.seed = 1});
//   zeropage::load_weights("model.safetensors", model);
//   const torch::Tensor loss = model->forward(tokens, targets);
//
// tokens, targets, documents: [batch, length] of int64.
// Throws c10::Error for sequences that are longer than longest_sequence().
// Threads: the training thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>
#include <zeropage/checkpoint.h>
#include <zeropage/mesh.h>

#include "language_model/model/config.h"
#include "language_model/model/layers.h"

namespace language_model {

// What all layers of one forward share.
struct ForwardContext {
  RotaryAngles angles;  // where the model has them
  AttentionMask mask;
  KeyValueCache* cache = nullptr;
};

class LanguageModel : public torch::nn::Module {
 public:
  // The mean loss over the targets that are not kIgnored, fp32 []. In training of a model with experts, the loss of balance is added: what
  // transformers adds with output_router_logits, of the tokens of this forward and of all layers together. documents: numbers of the documents that are packed into each
  // row. A token sees its own document only, and positions begin anew with each; undefined: a row is one document.
  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& targets,
                        const torch::Tensor& documents = {});

  // [batch, vocabulary], fp32: of the token behind the last one. The tokens go behind those in the cache, which takes them too.
  torch::Tensor next_logits(const torch::Tensor& tokens, KeyValueCache& cache);
  // [batch, length, vocabulary].
  torch::Tensor logits(const torch::Tensor& tokens, const torch::Tensor& documents = {});

  // Layers that backward computes again, from now on; none at first.
  void recompute(zeropage::checkpointing::EveryBlocks every) { recompute_ = every; }

  // Adds adapters to these layers, by the ends of their names ("q_proj"), and freezes everything else. Before the module is
  // wrapped. Throws where a name has no layer, with the names that there are.
  void add_adapters(const std::vector<std::string>& targets, const AdapterOptions& options);
  // By name, such as "model.layers.0.self_attn.q_proj".
  std::vector<std::pair<std::string, Projection>> projections() const;

  // From now on a row's tokens are over those ranks: forward() takes this rank's part of tokens, targets and documents
  // (split_context()). Throws where the model cannot be run so, with why. Before the module is wrapped, over a mesh with that axis.
  void share_rows(ContextAxis axis);
  // Null: each rank has whole rows.
  const ContextAxis* context() const { return context_ ? &*context_ : nullptr; }

  // Puts the layers' experts on the ranks along the mesh's axis "expert" (zeropage/expert_parallel.h). Throws where the model has none.
  // Before the module is wrapped, over that mesh. Collective.
  void spread_experts(const zeropage::comm::Mesh& mesh);
  // The ranks that have all experts between them. Null: each rank has all.
  const zeropage::comm::World* expert_ranks() const {
    return expert_ranks_ ? &*expert_ranks_ : nullptr;
  }

  const ModelConfig& config() const { return config_; }

 protected:
  explicit LanguageModel(ModelConfig config)
      : config_(std::move(config)), recompute_(zeropage::checkpointing::EveryBlocks::none()) {}

  // Draws the weights, with first_deviation() of each matrix; biases stay zero and norms one.
  void draw(uint64_t seed);

 private:
  // Places of this rank's tokens in their document, or in their row: [1 or batch, length].
  torch::Tensor positions_of(const torch::Tensor& tokens, const torch::Tensor& documents) const;
  // What the head sees: [batch, length, width].
  torch::Tensor body(const torch::Tensor& tokens, const torch::Tensor& documents,
                     KeyValueCache* cache);
  virtual torch::Tensor embed(const torch::Tensor& tokens, const torch::Tensor& positions) = 0;
  virtual int64_t layer_count() const = 0;
  virtual torch::Tensor run_layer(int64_t layer, const torch::Tensor& x,
                                  const ForwardContext& context) = 0;
  virtual torch::Tensor final_norm(const torch::Tensor& x) = 0;
  virtual const torch::Tensor& head_weight() const = 0;  // [vocabulary, width]
  // The loss of balance of the training forwards since the last call; undefined where there is none.
  virtual torch::Tensor balance_loss() { return {}; }

  const ModelConfig config_;
  zeropage::checkpointing::EveryBlocks recompute_;
  std::optional<ContextAxis> context_;
  std::optional<zeropage::comm::World> expert_ranks_;
};

// The deviation with which a matrix of that name is drawn: config.initial_deviation, and less where GPT-2's layers add to what
// goes through all of them.
double first_deviation(const ModelConfig& config, const std::string& name);

struct MakeOptions {
  // What the weights are drawn from. None: they are zero, for a module that is loaded next.
  std::optional<uint64_t> seed;
};
std::shared_ptr<LanguageModel> make_model(const ModelConfig& config,
                                          const MakeOptions& options = {});

}  // namespace language_model

// Llama, Mistral and Qwen2: RMS norms, rotary positions, attention whose heads of keys are shared, SwiGLU (Touvron et al. 2023).
//
//   model.embed_tokens  model.layers.N.{input_layernorm, self_attn.{q,k,v,o}_proj, post_attention_layernorm,
//   mlp.{gate,up,down}_proj}  model.norm  lm_head
//
// Mixtral, Qwen2-MoE and Qwen3-MoE: the same with a SparseMlp in the place of some or all MLPs.
#pragma once

#include "language_model/model/language_model.h"
#include "language_model/model/mlp.h"

namespace language_model {

class LlamaAttentionImpl : public torch::nn::Module {
 public:
  explicit LlamaAttentionImpl(const ModelConfig& config);
  torch::Tensor forward(const torch::Tensor& x, int64_t layer, const ForwardContext& context);

 private:
  const int64_t head_width_;
  Projection q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
  RmsNorm q_norm{nullptr}, k_norm{nullptr};  // of each head; empty where there are none
};
TORCH_MODULE(LlamaAttention);

class LlamaLayerImpl : public torch::nn::Module {
 public:
  LlamaLayerImpl(const ModelConfig& config, int64_t layer);
  torch::Tensor forward(const torch::Tensor& x, int64_t layer, const ForwardContext& context);
  // Null where the layer has none.
  zeropage::parallel::ExpertsImpl* experts() {
    return sparse.is_empty() ? nullptr : sparse->experts.get();
  }

 private:
  RmsNorm input_layernorm{nullptr}, post_attention_layernorm{nullptr};
  LlamaAttention self_attn{nullptr};
  LlamaMlp mlp{nullptr};
  SparseMlp sparse{nullptr};  // one of both is empty
};
TORCH_MODULE(LlamaLayer);

class LlamaBodyImpl : public torch::nn::Module {
 public:
  explicit LlamaBodyImpl(const ModelConfig& config);

  Table embed_tokens{nullptr};
  torch::nn::ModuleList layers{nullptr};
  RmsNorm norm{nullptr};
};
TORCH_MODULE(LlamaBody);

class Llama final : public LanguageModel {
 public:
  explicit Llama(const ModelConfig& config, const MakeOptions& options = {});

 private:
  torch::Tensor embed(const torch::Tensor& tokens, const torch::Tensor& positions) override;
  int64_t layer_count() const override { return static_cast<int64_t>(model->layers->size()); }
  torch::Tensor run_layer(int64_t layer, const torch::Tensor& x,
                          const ForwardContext& context) override;
  torch::Tensor final_norm(const torch::Tensor& x) override { return model->norm(x); }
  const torch::Tensor& head_weight() const override { return lm_head->weight; }
  torch::Tensor balance_loss() override;

  LlamaBody model{nullptr};
  Table lm_head{nullptr};
};

}  // namespace language_model

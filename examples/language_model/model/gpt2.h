// GPT-2 (Radford et al. 2019): learned positions, norms before attention and MLP, GELU.
//
//   transformer.{wte, wpe}  transformer.h.N.{ln_1, attn.{c_attn, c_proj}, ln_2, mlp.{c_fc, c_proj}}  transformer.ln_f  lm_head
#pragma once

#include "language_model/model/language_model.h"

namespace language_model {

class Gpt2AttentionImpl : public torch::nn::Module {
 public:
  explicit Gpt2AttentionImpl(const ModelConfig& config);
  torch::Tensor forward(const torch::Tensor& x, int64_t layer, const ForwardContext& context);

 private:
  const int64_t heads_;
  Projection c_attn{nullptr}, c_proj{nullptr};
};
TORCH_MODULE(Gpt2Attention);

class Gpt2MlpImpl : public torch::nn::Module {
 public:
  explicit Gpt2MlpImpl(const ModelConfig& config);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  Projection c_fc{nullptr}, c_proj{nullptr};
};
TORCH_MODULE(Gpt2Mlp);

class Gpt2LayerImpl : public torch::nn::Module {
 public:
  explicit Gpt2LayerImpl(const ModelConfig& config);
  torch::Tensor forward(const torch::Tensor& x, int64_t layer, const ForwardContext& context);

 private:
  const double dropout_;
  torch::nn::LayerNorm ln_1{nullptr}, ln_2{nullptr};
  Gpt2Attention attn{nullptr};
  Gpt2Mlp mlp{nullptr};
};
TORCH_MODULE(Gpt2Layer);

class Gpt2BodyImpl : public torch::nn::Module {
 public:
  explicit Gpt2BodyImpl(const ModelConfig& config);

  Table wte{nullptr}, wpe{nullptr};
  torch::nn::ModuleList h{nullptr};
  torch::nn::LayerNorm ln_f{nullptr};
};
TORCH_MODULE(Gpt2Body);

class Gpt2 final : public LanguageModel {
 public:
  explicit Gpt2(const ModelConfig& config, const MakeOptions& options = {});

 private:
  torch::Tensor embed(const torch::Tensor& tokens, const torch::Tensor& positions) override;
  int64_t layer_count() const override { return static_cast<int64_t>(transformer->h->size()); }
  torch::Tensor run_layer(int64_t layer, const torch::Tensor& x,
                          const ForwardContext& context) override;
  torch::Tensor final_norm(const torch::Tensor& x) override { return transformer->ln_f(x); }
  const torch::Tensor& head_weight() const override { return lm_head->weight; }

  Gpt2Body transformer{nullptr};
  Table lm_head{nullptr};
};

}  // namespace language_model

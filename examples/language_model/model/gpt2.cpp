#include "language_model/model/gpt2.h"

#include <zeropage/tiled.h>

namespace language_model {
namespace {

torch::nn::LayerNorm layer_norm(const ModelConfig& config) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width}).eps(config.norm_epsilon));
}

Projection conv1d(int64_t inputs, int64_t outputs) {
  return Projection(inputs, outputs, /*bias=*/true, ProjectionImpl::Layout::kInputsFirst);
}

}  // namespace

Gpt2AttentionImpl::Gpt2AttentionImpl(const ModelConfig& config) : heads_(config.heads) {
  c_attn = register_module("c_attn", conv1d(config.width, 3 * config.width));
  c_proj = register_module("c_proj", conv1d(config.width, config.width));
}

torch::Tensor Gpt2AttentionImpl::forward(const torch::Tensor& x, int64_t layer,
                                         const ForwardContext& context) {
  const auto parts = c_attn(x).chunk(3, -1);
  const auto by_head = [&](const torch::Tensor& t) {
    return t.reshape({x.size(0), x.size(1), heads_, -1}).transpose(1, 2);
  };
  torch::Tensor keys = by_head(parts[1]), values = by_head(parts[2]);
  if (context.cache != nullptr) std::tie(keys, values) = context.cache->append(layer, keys, values);
  return c_proj(attention(by_head(parts[0]), keys, values, context.mask));
}

Gpt2MlpImpl::Gpt2MlpImpl(const ModelConfig& config) {
  c_fc = register_module("c_fc", conv1d(config.width, config.mlp_width));
  c_proj = register_module("c_proj", conv1d(config.mlp_width, config.width));
}

torch::Tensor Gpt2MlpImpl::forward(const torch::Tensor& x) {
  return c_proj(torch::gelu(c_fc(x), "tanh"));
}

Gpt2LayerImpl::Gpt2LayerImpl(const ModelConfig& config) : dropout_(config.residual_dropout) {
  ln_1 = register_module("ln_1", layer_norm(config));
  attn = register_module("attn", Gpt2Attention(config));
  ln_2 = register_module("ln_2", layer_norm(config));
  mlp = register_module("mlp", Gpt2Mlp(config));
}

torch::Tensor Gpt2LayerImpl::forward(const torch::Tensor& x, int64_t layer,
                                     const ForwardContext& context) {
  const auto drop = [&](const torch::Tensor& t) {
    return torch::dropout(t, dropout_, is_training());
  };
  const auto [normed, mixed] = zeropage::fused::add_layer_norm(
      drop(attn(ln_1(x), layer, context)), x, ln_2->weight, ln_2->bias, ln_2->options.eps());
  return mixed + drop(context.tiles_mlps ? zeropage::tiled(mlp, normed) : mlp(normed));
}

Gpt2BodyImpl::Gpt2BodyImpl(const ModelConfig& config) {
  wte = register_module("wte", Table(config.vocabulary, config.width));
  wpe = register_module("wpe", Table(config.context, config.width));
  h = register_module("h", torch::nn::ModuleList());
  for (int64_t layer = 0; layer < config.layers; ++layer) h->push_back(Gpt2Layer(config));
  ln_f = register_module("ln_f", layer_norm(config));
}

Gpt2::Gpt2(const ModelConfig& config, const MakeOptions& options) : LanguageModel(config) {
  transformer = register_module("transformer", Gpt2Body(config));
  const torch::Tensor tied = config.tied_head ? transformer->wte->weight : torch::Tensor();
  lm_head = register_module("lm_head", Table(config.vocabulary, config.width, tied));
  if (options.seed) draw(*options.seed);
}

torch::Tensor Gpt2::embed(const torch::Tensor& tokens, const torch::Tensor& positions) {
  const torch::Tensor x = transformer->wte(tokens) + transformer->wpe(positions);
  return torch::dropout(x, config().embedding_dropout, is_training());
}

torch::Tensor Gpt2::run_layer(int64_t layer, const torch::Tensor& x,
                              const ForwardContext& context) {
  const auto index = static_cast<size_t>(layer);
  return transformer->h->ptr(index)->as<Gpt2Layer>()->forward(x, layer, context);
}

}  // namespace language_model

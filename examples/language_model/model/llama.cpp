#include "language_model/model/llama.h"

namespace language_model {

LlamaAttentionImpl::LlamaAttentionImpl(const ModelConfig& config) : head_width_(config.head_width) {
  const int64_t queries = config.heads * config.head_width;
  const int64_t keys = config.key_value_heads * config.head_width;
  q_proj = register_module("q_proj", Projection(config.width, queries, config.query_bias));
  k_proj = register_module("k_proj", Projection(config.width, keys, config.query_bias));
  v_proj = register_module("v_proj", Projection(config.width, keys, config.query_bias));
  o_proj = register_module("o_proj", Projection(queries, config.width, config.output_bias));
}

torch::Tensor LlamaAttentionImpl::forward(const torch::Tensor& x, int64_t layer,
                                          const ForwardContext& context) {
  const auto by_head = [&](const torch::Tensor& t) {
    return t.view({x.size(0), x.size(1), -1, head_width_}).transpose(1, 2);
  };
  const auto turned = [&](const torch::Tensor& heads) {
    return zeropage::fused::rotary(heads, context.angles.cos, context.angles.sin);
  };
  const torch::Tensor queries = turned(by_head(q_proj(x)));
  torch::Tensor keys = turned(by_head(k_proj(x)));
  torch::Tensor values = by_head(v_proj(x));
  if (context.cache != nullptr) std::tie(keys, values) = context.cache->append(layer, keys, values);
  return o_proj(attention(queries, keys, values, context.mask));
}

LlamaMlpImpl::LlamaMlpImpl(const ModelConfig& config) {
  const auto projection = [&](int64_t inputs, int64_t outputs) {
    return Projection(inputs, outputs, config.mlp_bias);
  };
  gate_proj = register_module("gate_proj", projection(config.width, config.mlp_width));
  up_proj = register_module("up_proj", projection(config.width, config.mlp_width));
  down_proj = register_module("down_proj", projection(config.mlp_width, config.width));
}

torch::Tensor LlamaMlpImpl::forward(const torch::Tensor& x) {
  return down_proj(zeropage::fused::swiglu(gate_proj(x), up_proj(x)));
}

LlamaLayerImpl::LlamaLayerImpl(const ModelConfig& config) {
  const auto norm = [&] { return RmsNorm(config.width, config.norm_epsilon); };
  input_layernorm = register_module("input_layernorm", norm());
  self_attn = register_module("self_attn", LlamaAttention(config));
  post_attention_layernorm = register_module("post_attention_layernorm", norm());
  mlp = register_module("mlp", LlamaMlp(config));
}

torch::Tensor LlamaLayerImpl::forward(const torch::Tensor& x, int64_t layer,
                                      const ForwardContext& context) {
  const auto [normed, mixed] =
      post_attention_layernorm->add(self_attn(input_layernorm(x), layer, context), x);
  return mixed + mlp(normed);
}

LlamaBodyImpl::LlamaBodyImpl(const ModelConfig& config) {
  embed_tokens = register_module("embed_tokens", Table(config.vocabulary, config.width));
  layers = register_module("layers", torch::nn::ModuleList());
  for (int64_t layer = 0; layer < config.layers; ++layer) layers->push_back(LlamaLayer(config));
  norm = register_module("norm", RmsNorm(config.width, config.norm_epsilon));
}

Llama::Llama(const ModelConfig& config, const MakeOptions& options) : LanguageModel(config) {
  model = register_module("model", LlamaBody(config));
  const torch::Tensor tied = config.tied_head ? model->embed_tokens->weight : torch::Tensor();
  lm_head = register_module("lm_head", Table(config.vocabulary, config.width, tied));
  if (options.seed) draw(*options.seed);
}

torch::Tensor Llama::embed(const torch::Tensor& tokens, const torch::Tensor& /*positions*/) {
  return model->embed_tokens(tokens);
}

torch::Tensor Llama::run_layer(int64_t layer, const torch::Tensor& x,
                               const ForwardContext& context) {
  const auto index = static_cast<size_t>(layer);
  return model->layers->ptr(index)->as<LlamaLayer>()->forward(x, layer, context);
}

}  // namespace language_model

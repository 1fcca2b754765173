#include "language_model/model/llama.h"

namespace language_model {

LlamaAttentionImpl::LlamaAttentionImpl(const ModelConfig& config) : head_width_(config.head_width) {
  const int64_t queries = config.heads * config.head_width;
  const int64_t keys = config.key_value_heads * config.head_width;
  q_proj = register_module("q_proj", Projection(config.width, queries, config.query_bias));
  k_proj = register_module("k_proj", Projection(config.width, keys, config.query_bias));
  v_proj = register_module("v_proj", Projection(config.width, keys, config.query_bias));
  o_proj = register_module("o_proj", Projection(queries, config.width, config.output_bias));
  if (!config.head_norms) return;
  q_norm = register_module("q_norm", RmsNorm(head_width_, config.norm_epsilon));
  k_norm = register_module("k_norm", RmsNorm(head_width_, config.norm_epsilon));
}

torch::Tensor LlamaAttentionImpl::forward(const torch::Tensor& x, int64_t layer,
                                          const ForwardContext& context) {
  const auto by_head = [&](const torch::Tensor& t, RmsNorm norm) {
    const torch::Tensor heads = t.view({x.size(0), x.size(1), -1, head_width_});
    return (norm.is_empty() ? heads : norm(heads)).transpose(1, 2);
  };
  const auto turned = [&](const torch::Tensor& heads) {
    return zeropage::fused::rotary(heads, context.angles.cos, context.angles.sin);
  };
  const torch::Tensor queries = turned(by_head(q_proj(x), q_norm));
  torch::Tensor keys = turned(by_head(k_proj(x), k_norm));
  torch::Tensor values = by_head(v_proj(x), nullptr);
  if (context.cache != nullptr) std::tie(keys, values) = context.cache->append(layer, keys, values);
  return o_proj(attention(queries, keys, values, context.mask));
}

LlamaLayerImpl::LlamaLayerImpl(const ModelConfig& config, int64_t layer) {
  const auto norm = [&] { return RmsNorm(config.width, config.norm_epsilon); };
  input_layernorm = register_module("input_layernorm", norm());
  self_attn = register_module("self_attn", LlamaAttention(config));
  post_attention_layernorm = register_module("post_attention_layernorm", norm());
  if (!is_sparse(config, layer)) {
    mlp = register_module("mlp", LlamaMlp(config.width, config.mlp_width, config.mlp_bias));
    return;
  }
  const bool is_mixtral = config.architecture == Architecture::kMixtral;
  sparse = register_module(is_mixtral ? "block_sparse_moe" : "mlp", SparseMlp(config));
}

torch::Tensor LlamaLayerImpl::forward(const torch::Tensor& x, int64_t layer,
                                      const ForwardContext& context) {
  const auto [normed, mixed] =
      post_attention_layernorm->add(self_attn(input_layernorm(x), layer, context), x);
  return mixed + (sparse.is_empty() ? mlp(normed) : sparse(normed));
}

LlamaBodyImpl::LlamaBodyImpl(const ModelConfig& config) {
  embed_tokens = register_module("embed_tokens", Table(config.vocabulary, config.width));
  layers = register_module("layers", torch::nn::ModuleList());
  for (int64_t layer = 0; layer < config.layers; ++layer)
    layers->push_back(LlamaLayer(config, layer));
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

torch::Tensor Llama::balance_loss() {
  torch::Tensor chosen, probabilities;
  double tokens = 0;
  for (size_t layer = 0; layer < model->layers->size(); ++layer) {
    auto* const experts = model->layers->ptr(layer)->as<LlamaLayer>()->experts();
    if (experts == nullptr || !experts->options().keep_router_sums) continue;
    const auto sums = experts->router_sums();
    if (!sums) continue;
    chosen = chosen.defined() ? chosen + sums->chosen : sums->chosen;
    probabilities =
        probabilities.defined() ? probabilities + sums->probabilities : sums->probabilities;
    tokens += static_cast<double>(sums->tokens);
  }
  if (tokens == 0) return {};
  const ExpertsConfig& experts = *config().experts;
  return (chosen * probabilities).sum() *
         (experts.balance_loss * static_cast<double>(experts.count) / (tokens * tokens));
}

}  // namespace language_model

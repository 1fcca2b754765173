#include "byte_gpt/gpt.h"

#include <cmath>

namespace train_gpt {
namespace {

torch::nn::LayerNorm norm(int64_t d_model) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({d_model}));
}

}  // namespace

BlockImpl::BlockImpl(const GptConfig& config, const MakeFeedForward& make_feed_forward)
    : head_width_(config.d_model / config.heads), dropout_(config.dropout) {
  const int64_t d = config.d_model;
  attention_norm = register_module("attention_norm", norm(d));
  attention_qkv = register_module("attention_qkv", torch::nn::Linear(d, 3 * d));
  attention_out = register_module("attention_out", torch::nn::Linear(d, d));
  mlp_norm = register_module("mlp_norm", norm(d));
  if (make_feed_forward) {
    feed_forward = make_feed_forward();
    register_module("mlp", feed_forward.ptr());
    return;
  }
  mlp_up = register_module("mlp_up", torch::nn::Linear(d, 4 * d));
  mlp_down = register_module("mlp_down", torch::nn::Linear(4 * d, d));
}

torch::Tensor BlockImpl::attend(const torch::Tensor& x) {
  const int64_t batch = x.size(0), length = x.size(1);
  const auto qkv = attention_qkv(x).chunk(3, /*dim=*/-1);
  const auto by_head = [&](const torch::Tensor& t) {
    // The number of heads that this rank has, where the layer is cut over ranks.
    return t.view({batch, length, -1, head_width_}).transpose(1, 2);
  };
  const auto mixed = at::scaled_dot_product_attention(
      by_head(qkv[0]), by_head(qkv[1]), by_head(qkv[2]),
      /*attn_mask=*/{}, /*dropout_p=*/is_training() ? dropout_ : 0.0,
      /*is_causal=*/true);
  return attention_out(mixed.transpose(1, 2).reshape({batch, length, -1}));
}

torch::Tensor BlockImpl::feed(const torch::Tensor& x) {
  if (!feed_forward.is_empty()) return feed_forward.forward<torch::Tensor>(x);
  // Who repeats it in backward may do so when this block is gone.
  const auto mlp = [up = mlp_up.ptr(), down = mlp_down.ptr()](const torch::Tensor& x) {
    return down->forward(torch::gelu(up->forward(x)));
  };
  return run_mlp_ ? run_mlp_(torch::nn::ModuleList(mlp_up, mlp_down), x, mlp) : mlp(x);
}

torch::Tensor BlockImpl::forward(torch::Tensor x) {
  const auto drop = [&](const torch::Tensor& t) { return at::dropout(t, dropout_, is_training()); };
  x = x + drop(attend(attention_norm(x)));
  return x + drop(feed(mlp_norm(x)));
}

GptImpl::GptImpl(const GptConfig& config, uint64_t seed, const MakeFeedForward& make_feed_forward)
    : dropout_(config.dropout) {
  token_embedding =
      register_module("token_embedding", torch::nn::Embedding(kVocabulary, config.d_model));
  position_embedding =
      register_module("position_embedding", torch::nn::Embedding(config.sequence, config.d_model));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int64_t layer = 0; layer < config.layers; ++layer)
    blocks->push_back(Block(config, make_feed_forward));
  final_norm = register_module("final_norm", norm(config.d_model));
  if (config.untied_head) {
    head = register_module(
        "head", torch::nn::Linear(
                    torch::nn::LinearOptions(config.d_model, kVocabulary).bias(/*bias=*/false)));
  }
  initialize(config, seed);
}

void GptImpl::run_mlps_by(const RunMlp& run) {
  for (const auto& block : *blocks) block->as<Block>()->run_mlp_by(run);
}

void GptImpl::initialize(const GptConfig& config, uint64_t seed) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(seed);
  const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(config.layers));
  const auto ends_with = [](const std::string& name, std::string_view end) {
    return std::string_view(name).ends_with(end);
  };
  for (auto& parameter : named_parameters()) {
    const std::string& name = parameter.key();
    torch::Tensor& weight = parameter.value();
    if (weight.dim() >= 2) {
      const bool adds_to_residual = ends_with(name, "attention_out.weight") ||
                                    ends_with(name, "mlp_down.weight") ||
                                    ends_with(name, "mlp.w_down");
      torch::nn::init::normal_(weight, 0.0, adds_to_residual ? residual : 0.02);
    } else {
      weight.fill_(ends_with(name, "norm.weight") ? 1.0 : 0.0);
    }
  }
}

torch::Tensor GptImpl::embed(const torch::Tensor& tokens) {
  const auto positions =
      positions_.defined() ? positions_ : torch::arange(tokens.size(1), tokens.options());
  const auto x = token_embedding(tokens) + position_embedding(positions);
  // Who runs the parts apart may have them alone in its module.
  return at::dropout(x, dropout_, token_embedding->is_training());
}

torch::Tensor GptImpl::logits(const torch::Tensor& x) {
  if (head) return head(final_norm(x));
  return torch::nn::functional::linear(final_norm(x), token_embedding->weight);
}

torch::Tensor GptImpl::forward(const torch::Tensor& tokens) {
  auto x = embed(tokens);
  if (loop_) {
    x = loop_(blocks, std::move(x));
  } else {
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
  }
  return logits(x);
}

torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets) {
  const auto dtype = logits.scalar_type() == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32;
  return torch::nn::functional::cross_entropy(logits.to(dtype).view({-1, kVocabulary}),
                                              targets.view({-1}));
}

}  // namespace train_gpt

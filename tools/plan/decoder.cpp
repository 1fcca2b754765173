#include "tools/plan/decoder.h"

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/normalization.h>
#include <torch/torch.h>

#include "zeropage/fused.h"
#include "zeropage/tiled.h"

namespace zeropage::tools {
namespace {

using torch::Tensor;

class LayerNormPart final : public DecoderPart {
 public:
  explicit LayerNormPart(int64_t width)
      : norm_(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))) {
  }
  Tensor forward(Tensor x) override { return norm_(x); }

 private:
  torch::nn::LayerNorm norm_;
};

class RmsNormPart final : public DecoderPart {
 public:
  explicit RmsNormPart(int64_t width)
      : weight_(register_parameter("weight", torch::ones({width}))) {}
  Tensor forward(Tensor x) override {
    const Tensor wide = x.to(torch::kFloat32);
    const Tensor mean = wide.pow(2).mean(-1, /*keepdim=*/true);
    return weight_ * (wide * torch::rsqrt(mean + 1e-6)).to(x.scalar_type());
  }

 private:
  Tensor weight_;
};

std::shared_ptr<DecoderPart> make_norm(const DecoderShape& shape) {
  if (shape.family == DecoderShape::Family::kGpt) {
    return std::make_shared<LayerNormPart>(shape.width);
  }
  return std::make_shared<RmsNormPart>(shape.width);
}

torch::nn::Linear linear(int64_t in, int64_t out, bool has_bias) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(has_bias));
}

class GeluPart final : public DecoderPart {
 public:
  explicit GeluPart(const DecoderShape& shape)
      : up_(register_module("up", linear(shape.width, shape.feed_forward, true))),
        down_(register_module("down", linear(shape.feed_forward, shape.width, true))) {}
  Tensor forward(Tensor x) override { return down_(torch::gelu(up_(x))); }

 private:
  torch::nn::Linear up_, down_;
};

class SwigluPart final : public DecoderPart {
 public:
  SwigluPart(int64_t width, int64_t feed_forward, bool has_bias)
      : gate_(register_module("gate", linear(width, feed_forward, has_bias))),
        up_(register_module("up", linear(width, feed_forward, has_bias))),
        down_(register_module("down", linear(feed_forward, width, has_bias))) {}
  Tensor forward(Tensor x) override { return down_(torch::silu(gate_(x)) * up_(x)); }

 private:
  torch::nn::Linear gate_, up_, down_;
};

// Experts, and beside them the one that all tokens take, times the sigmoid of a gate.
class ExpertsPart final : public DecoderPart {
 public:
  explicit ExpertsPart(const DecoderShape& shape)
      : experts_(register_module("experts", parallel::Experts(options_of(shape)))) {
    const int64_t shared = shape.experts->shared;
    if (shared == 0) return;
    shared_ = register_module(
        "shared", std::make_shared<SwigluPart>(shape.width, shared, /*has_bias=*/false));
    shared_gate_ = register_module("shared_gate", linear(shape.width, 1, /*has_bias=*/false));
  }

  Tensor forward(Tensor x) override {
    const Tensor chosen = experts_(x);
    if (shared_ == nullptr) return chosen;
    return chosen + torch::sigmoid(shared_gate_(x)) * shared_->forward(x);
  }
  const parallel::Experts& experts() const { return experts_; }

 private:
  static parallel::ExpertsOptions options_of(const DecoderShape& shape) {
    const ExpertShape& of = *shape.experts;
    parallel::ExpertsOptions options(shape.width, of.feed_forward, of.count, of.active);
    const bool is_gpt = shape.family == DecoderShape::Family::kGpt;
    options.activation =
        is_gpt ? parallel::ExpertActivation::kGelu : parallel::ExpertActivation::kSwiglu;
    options.normalise = of.normalises;
    // Any factor has the same operators.
    options.balance_loss = 0.01;
    return options;
  }

  parallel::Experts experts_;
  std::shared_ptr<SwigluPart> shared_;
  torch::nn::Linear shared_gate_{nullptr};
};

std::shared_ptr<DecoderPart> make_feed_forward(const DecoderShape& shape, int64_t layer) {
  if (shape.is_sparse(layer)) return std::make_shared<ExpertsPart>(shape);
  if (shape.family == DecoderShape::Family::kGpt) return std::make_shared<GeluPart>(shape);
  return std::make_shared<SwigluPart>(shape.width, shape.feed_forward, shape.has_feed_forward_bias);
}

// What both families have: x + attention(norm(x)), then x + mlp(norm(x)).
class BlockPart : public DecoderPart {
 public:
  explicit BlockPart(const DecoderShape& shape)
      : attention_norm_(register_module("attention_norm", make_norm(shape))),
        mlp_norm_(register_module("mlp_norm", make_norm(shape))) {}

  Tensor forward(Tensor x) override {
    x = x + attend(attention_norm_->forward(x));
    const Tensor normed = mlp_norm_->forward(x);
    const auto run = [mlp = mlp_](const Tensor& tile) { return mlp->forward(tile); };
    return x + (tiles_mlp_ ? tiled(*mlp_, normed, run) : run(normed));
  }
  // Behind the constructor, so that attention's parameters come first, as in a script's module.
  void add_feed_forward(std::shared_ptr<DecoderPart> mlp, bool in_tiles) {
    mlp_ = register_module("mlp", std::move(mlp));
    tiles_mlp_ = in_tiles;
  }

 protected:
  virtual Tensor attend(const Tensor& x) = 0;

 private:
  bool tiles_mlp_ = false;
  std::shared_ptr<DecoderPart> attention_norm_;
  std::shared_ptr<DecoderPart> mlp_norm_;
  std::shared_ptr<DecoderPart> mlp_;
};

// [batch, length, heads width] -> [batch, heads, length, width]
Tensor by_head(const Tensor& x, int64_t width) {
  return x.view({x.size(0), x.size(1), -1, width}).transpose(1, 2);
}

// And back, of causal attention.
Tensor causal(const Tensor& query, const Tensor& key, const Tensor& value) {
  const Tensor mixed = at::scaled_dot_product_attention(query, key, value, /*attn_mask=*/{},
                                                        /*dropout_p=*/0.0, /*is_causal=*/true);
  return mixed.transpose(1, 2).reshape({mixed.size(0), mixed.size(2), -1});
}

class GptBlock final : public BlockPart {
 public:
  explicit GptBlock(const DecoderShape& shape)
      : BlockPart(shape),
        head_width_(shape.head_width),
        qkv_(register_module("qkv", linear(shape.width, 3 * shape.width, true))),
        out_(register_module("out", linear(shape.width, shape.width, true))) {}

 private:
  Tensor attend(const Tensor& x) override {
    const auto parts = qkv_(x).chunk(3, /*dim=*/-1);
    return out_(causal(by_head(parts[0], head_width_), by_head(parts[1], head_width_),
                       by_head(parts[2], head_width_)));
  }

  const int64_t head_width_;
  torch::nn::Linear qkv_, out_;
};

class LlamaBlock final : public BlockPart {
 public:
  explicit LlamaBlock(const DecoderShape& shape)
      : BlockPart(shape),
        head_width_(shape.head_width),
        sharing_(shape.heads / shape.key_heads),
        query_(of_heads("query", shape, shape.heads)),
        key_(of_heads("key", shape, shape.key_heads)),
        value_(of_heads("value", shape, shape.key_heads)),
        out_(register_module(
            "out", linear(shape.heads * shape.head_width, shape.width, shape.has_output_bias))) {
    if (!shape.has_head_norms) return;
    query_norm_ = register_module("query_norm", std::make_shared<RmsNormPart>(head_width_));
    key_norm_ = register_module("key_norm", std::make_shared<RmsNormPart>(head_width_));
  }

 private:
  torch::nn::Linear of_heads(const char* name, const DecoderShape& shape, int64_t heads) {
    return register_module(name,
                           linear(shape.width, heads * shape.head_width, shape.has_query_bias));
  }

  // [1, 1, length, width]: the angles by position, of each half of a head.
  Tensor angles(const Tensor& x) const {
    const auto options = x.options().dtype(torch::kFloat32);
    const Tensor positions = torch::arange(x.size(1), options);
    const Tensor steps =
        torch::pow(10000.0, torch::arange(0, head_width_, 2, options) / -double(head_width_));
    const Tensor half = torch::outer(positions, steps);
    return torch::cat({half, half}, -1).view({1, 1, x.size(1), head_width_});
  }

  static Tensor rotated(const Tensor& x, const Tensor& cosines, const Tensor& sines) {
    const auto halves = x.chunk(2, /*dim=*/-1);
    return x * cosines + torch::cat({-halves[1], halves[0]}, -1) * sines;
  }

  // A head of keys for each head of queries.
  Tensor shared(const Tensor& x) const {
    if (sharing_ == 1) return x;
    return x.unsqueeze(2)
        .expand({x.size(0), x.size(1), sharing_, x.size(2), x.size(3)})
        .reshape({x.size(0), x.size(1) * sharing_, x.size(2), x.size(3)});
  }

  Tensor attend(const Tensor& x) override {
    const Tensor by_position = angles(x);
    const Tensor cosines = by_position.cos().to(x.scalar_type());
    const Tensor sines = by_position.sin().to(x.scalar_type());
    const auto heads = [&](torch::nn::Linear& linear, const std::shared_ptr<RmsNormPart>& norm) {
      const Tensor by_heads = by_head(linear(x), head_width_);
      return rotated(norm == nullptr ? by_heads : norm->forward(by_heads), cosines, sines);
    };
    const Tensor query = heads(query_, query_norm_);
    const Tensor key = heads(key_, key_norm_);
    return out_(causal(query, shared(key), shared(by_head(value_(x), head_width_))));
  }

  const int64_t head_width_;
  const int64_t sharing_;  // queries' heads a head of keys
  torch::nn::Linear query_, key_, value_, out_;
  std::shared_ptr<RmsNormPart> query_norm_, key_norm_;  // null: none
};

std::shared_ptr<BlockPart> make_block(const DecoderShape& shape) {
  if (shape.family == DecoderShape::Family::kGpt) return std::make_shared<GptBlock>(shape);
  return std::make_shared<LlamaBlock>(shape);
}

}  // namespace

DecoderImpl::DecoderImpl(const DecoderShape& shape, int64_t sequence, DecoderTiles tiles)
    : tiles_(tiles) {
  token_embedding_ =
      register_module("token_embedding", torch::nn::Embedding(shape.vocabulary, shape.width));
  if (shape.family == DecoderShape::Family::kGpt) {
    const int64_t positions = shape.positions > 0 ? shape.positions : sequence;
    position_embedding_ =
        register_module("position_embedding", torch::nn::Embedding(positions, shape.width));
  }
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    const auto block = make_block(shape);
    auto mlp = make_feed_forward(shape, layer);
    if (const auto* const part = dynamic_cast<const ExpertsPart*>(mlp.get())) {
      experts_.push_back(part->experts());
    }
    block->add_feed_forward(std::move(mlp), tiles.mlp);
    parts_.push_back(block);
    blocks_->push_back(parts_.back());
  }
  final_norm_ = register_module("final_norm", make_norm(shape));
  if (!shape.is_head_tied) {
    head_ = register_module("head", linear(shape.width, shape.vocabulary, false));
  }
}

Tensor DecoderImpl::forward(const Tensor& tokens, const Tensor& targets) {
  Tensor x = token_embedding_(tokens);
  if (position_embedding_) {
    x = x + position_embedding_(torch::arange(tokens.size(1), tokens.options()));
  }
  x = checkpointing::checkpoint_each(
      static_cast<int64_t>(parts_.size()), every_, std::move(x),
      [parts = parts_](Tensor state, int64_t index) {
        return parts[static_cast<size_t>(index)]->forward(std::move(state));
      });
  Tensor loss = head_loss(final_norm_->forward(x), targets);
  for (parallel::Experts& experts : experts_) loss = loss + experts->auxiliary_loss();
  return loss;
}

Tensor DecoderImpl::head_loss(const Tensor& x, const Tensor& targets) {
  const Tensor& weight = head_ ? head_->weight : token_embedding_->weight;
  if (tiles_.loss) return fused::linear_cross_entropy(x, weight, targets);
  const Tensor logits = torch::nn::functional::linear(x, weight);
  return torch::nn::functional::cross_entropy(
      logits.to(torch::kFloat32).view({-1, logits.size(-1)}), targets.view({-1}));
}

}  // namespace zeropage::tools

// Small models of the usual kinds, whose steps do not fit below a limit of memory.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

namespace zeropage::testing {

struct Net : torch::nn::Module {
  virtual torch::Tensor forward(const torch::Tensor& x) = 0;
};

// Attention and two products with something between, on top of a norm each.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, bool gated) : gated_(gated) {
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    if (gated) gate = register_module("gate", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
    scale = register_parameter("scale", torch::ones({2, width}));
  }
  torch::Tensor normed(const torch::Tensor& x, int64_t which) {
    if (gated_) return torch::rms_norm(x, {x.size(-1)}, scale[which]);
    return torch::layer_norm(x, {x.size(-1)}, scale[which]);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    constexpr int64_t kHeads = 4;
    const auto heads = [&](const torch::Tensor& t) {
      return t.view({x.size(0), x.size(1), kHeads, -1}).transpose(1, 2);
    };
    const auto parts = qkv(normed(x, 0)).chunk(3, -1);
    const auto mixed = torch::scaled_dot_product_attention(
        heads(parts[0]), heads(parts[1]), heads(parts[2]), {}, 0, /*is_causal=*/true);
    const auto y = x + out(mixed.transpose(1, 2).flatten(2));
    const auto z = normed(y, 1);
    return y + down(gated_ ? torch::silu(gate(z)) * up(z) : torch::gelu(up(z)));
  }
  const bool gated_;
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, gate{nullptr}, down{nullptr};
  torch::Tensor scale;
};
TORCH_MODULE(Block);

inline constexpr int64_t kWords = 1024;

// A GPT has layer norms, GELU and a tied head; a Llama RMS norms, SwiGLU and a head of its own.
struct SmallTransformer : Net {
  explicit SmallTransformer(bool is_llama) {
    constexpr int64_t kWidth = 64, kBlocks = 4;
    embedding = register_module("embedding", torch::nn::Embedding(kWords, kWidth));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(Block(kWidth, is_llama));
    if (is_llama) head = register_module("head", torch::nn::Linear(kWidth, kWords));
  }
  torch::Tensor forward(const torch::Tensor& tokens) override {
    torch::Tensor x = embedding(tokens);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head ? head(x) : torch::nn::functional::linear(x, embedding->weight);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::Linear head{nullptr};
};

struct ResNet : Net {
  ResNet() {
    int64_t channels = 3;
    for (const int64_t out : {16, 32, 64}) {
      const auto name = std::to_string(out);
      const auto conv = [&](const std::string& which, int64_t in, int64_t stride) {
        convs.push_back(register_module(
            which + name,
            torch::nn::Conv2d(
                torch::nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false))));
        norms.push_back(register_module("norm" + which + name, torch::nn::BatchNorm2d(out)));
      };
      conv("first", channels, channels == 3 ? 1 : 2);
      conv("second", out, 1);
      conv("third", out, 1);
      channels = out;
    }
    head = register_module("head", torch::nn::Linear(channels, 10));
  }
  torch::Tensor forward(const torch::Tensor& images) override {
    torch::Tensor x = images;
    for (size_t i = 0; i < convs.size(); i += 3) {
      x = torch::relu(norms[i](convs[i](x)));
      const auto y = torch::relu(norms[i + 1](convs[i + 1](x)));
      x = torch::relu(x + norms[i + 2](convs[i + 2](y)));
    }
    return head(x.mean({2, 3}));
  }
  std::vector<torch::nn::Conv2d> convs;
  std::vector<torch::nn::BatchNorm2d> norms;
  torch::nn::Linear head{nullptr};
};

struct Lstm : Net {
  Lstm() {
    constexpr int64_t kWidth = 96;
    embedding = register_module("embedding", torch::nn::Embedding(kWords, kWidth));
    lstm = register_module(
        "lstm",
        torch::nn::LSTM(torch::nn::LSTMOptions(kWidth, kWidth).num_layers(2).batch_first(true)));
    head = register_module("head", torch::nn::Linear(kWidth, kWords));
  }
  torch::Tensor forward(const torch::Tensor& tokens) override {
    return head(std::get<0>(lstm(embedding(tokens))));
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Linear head{nullptr};
};

struct LimitedModel {
  const char* name;
  std::function<std::shared_ptr<Net>()> make;
  torch::Tensor samples;
  torch::Tensor targets;
};

inline std::vector<LimitedModel> limited_models() {
  torch::manual_seed(7);
  const torch::Tensor words = torch::randint(kWords, {16, 65});
  const torch::Tensor read = words.narrow(1, 0, 64).contiguous();
  const torch::Tensor next = words.narrow(1, 1, 64).contiguous();
  return {{"GPT", [] { return std::make_shared<SmallTransformer>(false); }, read, next},
          {"Llama", [] { return std::make_shared<SmallTransformer>(true); }, read, next},
          {"ResNet", [] { return std::make_shared<ResNet>(); }, torch::randn({16, 3, 32, 32}),
           torch::randint(10, {16})},
          {"LSTM", [] { return std::make_shared<Lstm>(); }, read, next}};
}

// The mean over classes, of any of them.
inline torch::Tensor class_loss(const torch::Tensor& output, const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(output.flatten(0, -2), targets.flatten());
}

}  // namespace zeropage::testing

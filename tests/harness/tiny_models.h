// Small modules that hold the parameters which break sharding: ragged, scalar, empty, frozen,
// unused, tied, strided; and the layers with a mind of their own: convolution, batch norm,
// recurrence, attention.
#pragma once

#include <torch/torch.h>

namespace zeropage::testing {

// Every kind of odd parameter at once. [batch, 7] -> [batch, 7]
struct OddballImpl : torch::nn::Module {
  OddballImpl() {
    first = register_module("first", torch::nn::Linear(7, 13));
    frozen = register_module("frozen", torch::nn::Linear(13, 13));
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
    unused = register_module("unused", torch::nn::Linear(5, 3));
    scale = register_parameter("scale", torch::full({}, 1.5));
    empty = register_parameter("empty", torch::zeros({0, 3}));
    // Dense, but not in row-major order.
    strided = register_parameter("strided", torch::randn({13, 11}).t());
    last = register_module("last", torch::nn::Linear(torch::nn::LinearOptions(11, 7).bias(false)));
    // One tensor under two names, used in both places.
    tied = register_parameter("tied", last->weight);
    steps = register_buffer("steps", torch::zeros({1}, torch::kInt64));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = torch::tanh(frozen(torch::relu(first(x))));
    y = torch::matmul(y, strided.t()) * scale + empty.sum();
    y = y + torch::matmul(x, tied);
    return last(y);
  }

  torch::nn::Linear first{nullptr}, frozen{nullptr}, unused{nullptr}, last{nullptr};
  torch::Tensor scale, empty, strided, tied, steps;
};
TORCH_MODULE(Oddball);

// A residual convolution net with batch norm. [batch, 7] -> [batch, 7]
struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    conv1 =
        register_module("conv1", torch::nn::Conv1d(torch::nn::Conv1dOptions(1, 6, 3).padding(1)));
    norm1 = register_module("norm1", torch::nn::BatchNorm1d(6));
    conv2 = register_module(
        "conv2", torch::nn::Conv1d(torch::nn::Conv1dOptions(6, 6, 3).padding(1).bias(false)));
    norm2 = register_module("norm2", torch::nn::BatchNorm1d(6));
    head = register_module("head", torch::nn::Linear(6, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = torch::relu(norm1(conv1(x.unsqueeze(1))));
    y = torch::relu(y + norm2(conv2(y)));
    return head(y.transpose(1, 2)).squeeze(-1);
  }
  torch::nn::Conv1d conv1{nullptr}, conv2{nullptr};
  torch::nn::BatchNorm1d norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(ConvNet);

// A two-layer LSTM over the features. [batch, 7] -> [batch, 7]
struct RecurrentImpl : torch::nn::Module {
  RecurrentImpl() {
    lstm = register_module(
        "lstm", torch::nn::LSTM(torch::nn::LSTMOptions(1, 9).num_layers(2).batch_first(true)));
    head = register_module("head", torch::nn::Linear(9, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return head(std::get<0>(lstm(x.unsqueeze(-1)))).squeeze(-1);
  }
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Recurrent);

// Blocks in a ModuleList, attention, a head tied to the embedding. [batch, 7] real -> [batch, 7]
struct TransformerImpl : torch::nn::Module {
  TransformerImpl() {
    embedding = register_parameter("embedding", torch::randn({7, 16}) * 0.1);
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int layer = 0; layer < 3; ++layer) {
      blocks->push_back(torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(16, 4)));
      blocks->push_back(torch::nn::Linear(16, 16));
    }
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = x.unsqueeze(-1) * embedding;  // [batch, 7, 16]
    for (size_t layer = 0; layer < blocks->size(); layer += 2) {
      auto* attention = blocks[layer]->as<torch::nn::MultiheadAttention>();
      y = y + std::get<0>(attention->forward(y, y, y));
      y = y + torch::gelu(blocks[layer + 1]->as<torch::nn::Linear>()->forward(y));
    }
    return (norm(y) * embedding).sum(-1);
  }
  torch::Tensor embedding;
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Transformer);

}  // namespace zeropage::testing

// A pre-LN GPT over bytes, with the head tied to the token embedding unless asked otherwise (Radford et al. 2019,
// "Language Models are Unsupervised Multitask Learners"). A plain LibTorch module: nothing in it
// knows Zeropage.
#pragma once

#include <functional>

#include <torch/torch.h>

namespace train_gpt {

inline constexpr int64_t kVocabulary = 257;  // bytes and the end of a text
inline constexpr int64_t kEndOfText = 256;

struct GptConfig {
  int64_t d_model = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t sequence = 128;
  // Probability of dropout of the embeddings' sum, attention's probabilities and what a block adds, from 0 to below 1. In
  // training, drawn from the default generator; 0 draws nothing.
  double dropout = 0;
  // Whether the head has weights of its own.
  bool untied_head = false;
};

// Makes what a block has in the place of its MLP: a module that takes and returns [batch, sequence, d_model].
using MakeFeedForward = std::function<torch::nn::AnyModule()>;

// Runs a block's MLP, which works at each token alone: `mlp`, of those layers, at x, [batch, sequence, d_model].
using RunMlp =
    std::function<torch::Tensor(const torch::nn::ModuleList& layers, const torch::Tensor& x,
                                const std::function<torch::Tensor(const torch::Tensor&)>& mlp)>;

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GptConfig& config, const MakeFeedForward& make_feed_forward = {});
  torch::Tensor forward(torch::Tensor x);  // [batch, sequence, d_model], also returned
  void run_mlp_by(RunMlp run) { run_mlp_ = std::move(run); }

 private:
  torch::Tensor attend(const torch::Tensor& x);
  torch::Tensor feed(const torch::Tensor& x);

  int64_t head_width_;
  double dropout_;
  torch::nn::LayerNorm attention_norm{nullptr};
  torch::nn::Linear attention_qkv{nullptr};
  torch::nn::Linear attention_out{nullptr};
  torch::nn::LayerNorm mlp_norm{nullptr};
  torch::nn::AnyModule feed_forward;  // empty: the two below
  torch::nn::Linear mlp_up{nullptr};
  torch::nn::Linear mlp_down{nullptr};
  RunMlp run_mlp_;  // empty: plainly
};
TORCH_MODULE(Block);

// The blocks one after the other.
using BlockLoop = std::function<torch::Tensor(const torch::nn::ModuleList&, torch::Tensor)>;

class GptImpl : public torch::nn::Module {
 public:
  // Weights are drawn from `seed`: normal with deviation 0.02, divided by sqrt(2 layers) where a
  // block adds to the residual stream; biases zero. A layer of make_feed_forward adds to it by a weight "w_down". Empty: blocks
  // have an MLP of 4 d_model.
  GptImpl(const GptConfig& config, uint64_t seed, const MakeFeedForward& make_feed_forward = {});

  torch::Tensor forward(
      const torch::Tensor& tokens);  // [batch, length] -> [batch, length, kVocabulary]

  // What forward does before the blocks, [batch, length] -> [batch, length, d_model], and after them, for who runs them
  // apart.
  torch::Tensor embed(const torch::Tensor& tokens);
  torch::Tensor logits(const torch::Tensor& x);

  // The positions of tokens in their sequences from now on, [length], int64; undefined: 0, 1, ...
  void set_positions(torch::Tensor positions) { positions_ = std::move(positions); }

  // How forward runs the blocks from now on, such as in regions that are repeated in backward; empty:
  // plainly.
  void run_blocks_by(BlockLoop loop) { loop_ = std::move(loop); }

  // How blocks run their MLPs from now on, such as on some tokens at a time; empty: plainly. Layers of make_feed_forward are run as
  // they are.
  void run_mlps_by(const RunMlp& run);

 private:
  void initialize(const GptConfig& config, uint64_t seed);

  double dropout_;
  BlockLoop loop_;
  torch::Tensor positions_;
  torch::nn::Embedding token_embedding{nullptr};
  torch::nn::Embedding position_embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm final_norm{nullptr};
  torch::nn::Linear head{nullptr};  // null: tied
};
TORCH_MODULE(Gpt);

// Mean cross-entropy, computed in fp32, or in fp64 where logits are: logits [batch, length, kVocabulary], targets [batch, length].
torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets);

}  // namespace train_gpt

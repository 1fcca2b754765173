// A decoder of any shape, to be planned: its operators are those that a training script runs, and nobody needs
// its values.
#pragma once

#include <memory>
#include <vector>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "tools/plan/decoder_shape.h"
#include "zeropage/checkpoint.h"
#include "zeropage/experts.h"

namespace zeropage::tools {

// [batch, sequence, width], both ways.
class DecoderPart : public torch::nn::Module {
 public:
  virtual torch::Tensor forward(torch::Tensor x) = 0;
};

// What runs on some tokens at a time.
struct DecoderTiles {
  bool mlp = false;   // by tiled() (zeropage/tiled.h)
  bool loss = false;  // with the head, by linear_cross_entropy() (zeropage/fused.h)
};

class DecoderImpl : public torch::nn::Module {
 public:
  // sequence: tokens of a sample, and of the table of positions where the shape names no other.
  DecoderImpl(const DecoderShape& shape, int64_t sequence, DecoderTiles tiles);

  // The loss of the next tokens, and those of balance of all experts. tokens, targets: [batch, sequence] of int64.
  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& targets);
  // Regions of that many blocks from here on.
  void checkpoint(checkpointing::EveryBlocks every) { every_ = every; }

 private:
  torch::Tensor head_loss(const torch::Tensor& x, const torch::Tensor& targets);

  const DecoderTiles tiles_;
  checkpointing::EveryBlocks every_ = checkpointing::EveryBlocks::none();
  torch::nn::Embedding token_embedding_{nullptr};
  torch::nn::Embedding position_embedding_{nullptr};  // null: positions are rotated into attention
  torch::nn::ModuleList blocks_{nullptr};
  std::vector<std::shared_ptr<DecoderPart>> parts_;  // of blocks_
  std::vector<parallel::Experts> experts_;           // of those that have some
  std::shared_ptr<DecoderPart> final_norm_;
  torch::nn::Linear head_{nullptr};  // null: the embedding is the head too
};
TORCH_MODULE(Decoder);

}  // namespace zeropage::tools

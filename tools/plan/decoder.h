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

class DecoderImpl : public torch::nn::Module {
 public:
  // sequence: tokens of a sample, and of the table of positions where the shape names no other.
  DecoderImpl(const DecoderShape& shape, int64_t sequence);

  // [batch, sequence] of int64 -> [batch, sequence, vocabulary]
  torch::Tensor forward(const torch::Tensor& tokens);
  // The losses of balance of all experts, once for each forward; undefined where there are none.
  torch::Tensor auxiliary_loss();
  // Regions of that many blocks from here on.
  void checkpoint(checkpointing::EveryBlocks every) { every_ = every; }

 private:
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

// logits: [batch, sequence, vocabulary]; targets: [batch, sequence] of int64.
torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets);

}  // namespace zeropage::tools

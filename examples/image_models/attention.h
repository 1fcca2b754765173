// Self-attention over the places of an image (Srinivas et al. 2021, section 3.1 and figure 4), with positions relative to each other
// that are learned for heights and widths apart.
#pragma once

#include <torch/torch.h>

namespace image_models {

// [batch, channels, side, side] -> [batch, channels, side, side]. Throws for other images, and, when made, for channels that the heads
// cannot share.
struct SpatialAttentionImpl : torch::nn::Module {
  SpatialAttentionImpl(int64_t channels, int64_t heads, int64_t side);
  torch::Tensor forward(const torch::Tensor& x);

  const int64_t heads, side;
  torch::nn::Conv2d qkv{nullptr};       // 1 x 1: queries, keys and values
  torch::Tensor rel_height, rel_width;  // [2 side - 1, channels / heads]
  torch::Tensor distance;               // [side * side] int64, a buffer: j - i + side - 1

 private:
  torch::Tensor position_logits(const torch::Tensor& queries) const;
};
TORCH_MODULE(SpatialAttention);

}  // namespace image_models

// Residual networks (He et al. 2015, "Deep Residual Learning for Image Recognition"). Names are those of torchvision, so its
// weights fit where the sizes do. A bottleneck halves the image in its 3 x 3 convolution, as torchvision's does.
//
// BoTNet (Srinivas et al. 2021, "Bottleneck Transformers for Visual Recognition") is a ResNet-50 whose last stage has self-attention in
// place of 3 x 3 convolutions.
#pragma once

#include <array>

#include <torch/torch.h>

#include "image_models/attention.h"
#include "image_models/image_model.h"

namespace image_models {

enum class Stem : uint8_t {
  kLarge,  // 7 x 7, stride 2, and max pooling: an image becomes a quarter as wide
  kSmall,  // 3 x 3 alone (section 4.2), for images of some 32 pixels
};

enum class Block : uint8_t { kBasic, kBottleneck };

struct ResNetOptions {
  ModelOptions model;
  Block block = Block::kBasic;
  std::array<int64_t, 4> depths = {2, 2, 2, 2};  // blocks of the stages
  Stem stem = Stem::kLarge;
  // Heads of self-attention in the last stage; 0: convolutions.
  int64_t attention_heads = 0;

  // The published network, but for what the options say.
  static ResNetOptions resnet18(const ModelOptions& model);
  static ResNetOptions resnet50(const ModelOptions& model);
  static ResNetOptions botnet50(const ModelOptions& model);
};

// A convolution without bias that keeps an image's size but for its stride.
torch::nn::Conv2d convolution(int64_t in, int64_t out, int64_t kernel, int64_t stride);

// [batch, channels, height, width] -> [batch, channels_out, height / stride, width / stride]
struct BasicBlockImpl : torch::nn::Module {
  BasicBlockImpl(int64_t channels, int64_t channels_out, int64_t stride);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::BatchNorm2d bn1{nullptr}, bn2{nullptr};
  torch::nn::Sequential downsample;  // empty where the sizes stay
};
TORCH_MODULE(BasicBlock);

struct BottleneckOptions {
  int64_t channels = 0;  // that come
  int64_t width = 0;     // in the middle; four times as many go
  int64_t stride = 1;
  int64_t attention_heads = 0;  // in place of the 3 x 3 convolution; 0: none
  int64_t map_side = 0;         // of the square that comes, for attention's positions
};

// The same, through fewer channels in the middle.
struct BottleneckImpl : torch::nn::Module {
  explicit BottleneckImpl(const BottleneckOptions& options);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr}, conv3{nullptr};
  SpatialAttention attention{nullptr};  // or conv2
  torch::nn::AvgPool2d pool{nullptr};   // behind attention, where the block halves
  torch::nn::BatchNorm2d bn1{nullptr}, bn2{nullptr}, bn3{nullptr};
  torch::nn::Sequential downsample;  // empty where the sizes stay
};
TORCH_MODULE(Bottleneck);

struct ResNetImpl : ImageModel {
  explicit ResNetImpl(const ResNetOptions& options);
  torch::Tensor forward(torch::Tensor images) override;
  std::string head() const override { return "fc"; }

  torch::nn::Conv2d conv1{nullptr};
  torch::nn::BatchNorm2d bn1{nullptr};
  torch::nn::MaxPool2d maxpool{nullptr};  // null for small images
  torch::nn::Sequential layer1, layer2, layer3, layer4;
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(ResNet);

}  // namespace image_models

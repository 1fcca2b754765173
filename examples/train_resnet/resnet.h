// ResNet-18 for small images (He et al. 2015, section 4.2, with the blocks of ResNet-18): a stem of one 3 x 3 convolution and no
// pooling, four stages of two basic blocks, of which the last three halve the image.
#pragma once

#include <cstdint>

#include <torch/torch.h>

namespace train_resnet {

struct ResNetOptions {
  int64_t channels = 1;  // of an image
  int64_t classes = 10;
  int64_t width = 64;  // channels of the first stage; each following one has twice as many
};

// [batch, channels, height, width] -> [batch, channels_out, height / stride, width / stride]
struct BasicBlockImpl : torch::nn::Module {
  BasicBlockImpl(int64_t channels, int64_t channels_out, int64_t stride);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::BatchNorm2d norm1{nullptr}, norm2{nullptr};
  torch::nn::Sequential shortcut;  // empty where the sizes stay
};
TORCH_MODULE(BasicBlock);

// [batch, channels, height, width] -> [batch, classes]
struct ResNetImpl : torch::nn::Module {
  explicit ResNetImpl(const ResNetOptions& options);
  torch::Tensor forward(torch::Tensor x);

  torch::nn::Conv2d stem{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Sequential stages;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(ResNet);

}  // namespace train_resnet

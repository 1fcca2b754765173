// EfficientNet-lite0: EfficientNet (Tan and Le 2019) without squeeze-and-excitation and with ReLU6, as TensorFlow published it for small
// devices. Names and padding are those of the PyTorch weights that scripts/get_data.sh efficientnet-lite0 fetches.
#pragma once

#include <torch/torch.h>

#include "image_models/image_model.h"

namespace image_models {

struct InvertedResidualOptions {
  int64_t channels = 0;
  int64_t channels_out = 0;
  int64_t expansion = 6;  // of channels in the middle
  int64_t kernel = 3;
  int64_t stride = 1;
};

// Expands, filters each channel by itself, projects (Sandler et al. 2018, "MobileNetV2"). [batch, channels, height, width] ->
// [batch, channels_out, height / stride, width / stride], rounded up
struct InvertedResidualImpl : torch::nn::Module {
  explicit InvertedResidualImpl(const InvertedResidualOptions& options);
  torch::Tensor forward(const torch::Tensor& x);

  const InvertedResidualOptions options;
  torch::nn::Conv2d expand{nullptr};  // null: no expansion
  torch::nn::Conv2d depthwise{nullptr}, project{nullptr};
  torch::nn::BatchNorm2d bn0{nullptr}, bn1{nullptr}, bn2{nullptr};
};
TORCH_MODULE(InvertedResidual);

struct EfficientNetLiteImpl : ImageModel {
  // width: of the stem, 32 as published; the others follow. Images of any side.
  explicit EfficientNetLiteImpl(const ModelOptions& options);
  torch::Tensor forward(torch::Tensor images) override;
  std::string head() const override { return "_fc"; }

  torch::nn::Conv2d stem{nullptr}, top{nullptr};
  torch::nn::BatchNorm2d bn0{nullptr}, bn1{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(EfficientNetLite);

}  // namespace image_models

#include "image_models/efficientnet.h"

#include <algorithm>
#include <vector>

#include <zeropage/check.h>

namespace image_models {
namespace {

constexpr int64_t kPublishedStem = 32;
constexpr double kDropout = 0.2;

// Stages as published: blocks, and those of its first block.
struct StageOptions {
  int64_t repeats;
  InvertedResidualOptions first;
};
const std::vector<StageOptions>& published_stages() {
  static const std::vector<StageOptions> stages = {
      {1, {32, 16, 1, 3, 1}},   {2, {16, 24, 6, 3, 2}},  {2, {24, 40, 6, 5, 2}},
      {3, {40, 80, 6, 3, 2}},   {3, {80, 112, 6, 5, 1}}, {4, {112, 192, 6, 5, 2}},
      {1, {192, 320, 6, 3, 1}},
  };
  return stages;
}

// Without bias and padding, which `same_padded` adds.
torch::nn::Conv2d bare_convolution(int64_t in, int64_t out, int64_t kernel, int64_t stride,
                                   int64_t groups = 1) {
  torch::nn::Conv2d made(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).groups(groups).bias(false));
  const torch::NoGradGuard no_grad;
  torch::nn::init::kaiming_normal_(made->weight, 0, torch::kFanOut, torch::kReLU);
  return made;
}

torch::nn::BatchNorm2d norm(int64_t channels) {
  return torch::nn::BatchNorm2d(torch::nn::BatchNorm2dOptions(channels).eps(1e-3).momentum(0.01));
}

// TensorFlow's padding "same": as much as the stride needs, and the odd pixel behind.
torch::Tensor same_padded(const torch::Tensor& x, int64_t kernel, int64_t stride) {
  const auto total = [&](int64_t side) {
    const int64_t out = (side + stride - 1) / stride;
    return std::max<int64_t>(0, (out - 1) * stride + kernel - side);
  };
  const int64_t rows = total(x.size(2)), columns = total(x.size(3));
  if (rows == 0 && columns == 0) return x;
  return torch::constant_pad_nd(x, {columns / 2, columns - columns / 2, rows / 2, rows - rows / 2},
                                0);
}

}  // namespace

InvertedResidualImpl::InvertedResidualImpl(const InvertedResidualOptions& options)
    : options(options) {
  const int64_t middle = options.channels * options.expansion;
  if (options.expansion > 1) {
    expand = register_module("_expand_conv", bare_convolution(options.channels, middle, 1, 1));
    bn0 = register_module("_bn0", norm(middle));
  }
  depthwise = register_module(
      "_depthwise_conv", bare_convolution(middle, middle, options.kernel, options.stride, middle));
  bn1 = register_module("_bn1", norm(middle));
  project = register_module("_project_conv", bare_convolution(middle, options.channels_out, 1, 1));
  bn2 = register_module("_bn2", norm(options.channels_out));
}

torch::Tensor InvertedResidualImpl::forward(const torch::Tensor& x) {
  torch::Tensor y = expand.is_empty() ? x : torch::relu6(bn0(expand(x)));
  y = torch::relu6(bn1(depthwise(same_padded(y, options.kernel, options.stride))));
  y = bn2(project(y));
  return options.stride == 1 && options.channels == options.channels_out ? y + x : y;
}

EfficientNetLiteImpl::EfficientNetLiteImpl(const ModelOptions& options) {
  const int64_t width = options.width == 0 ? kPublishedStem : options.width;
  ZP_CHECK(width >= 1 && options.classes >= 1 && options.channels >= 1,
           "EfficientNet-lite: expected a width, classes and channels of at least 1, got ", width,
           ", ", options.classes, " and ", options.channels);
  const auto scaled = [&](int64_t channels) {
    return std::max<int64_t>(1, channels * width / kPublishedStem);
  };
  stem = register_module("_conv_stem", bare_convolution(options.channels, width, 3, 2));
  bn0 = register_module("_bn0", norm(width));
  for (const StageOptions& stage : published_stages()) {
    InvertedResidualOptions block = stage.first;
    block.channels = scaled(block.channels);
    block.channels_out = scaled(block.channels_out);
    for (int64_t i = 0; i < stage.repeats; ++i) {
      blocks->push_back(InvertedResidual(block));
      block.channels = block.channels_out;
      block.stride = 1;
    }
  }
  register_module("_blocks", blocks);
  const int64_t last = scaled(320), features = scaled(1280);
  top = register_module("_conv_head", bare_convolution(last, features, 1, 1));
  bn1 = register_module("_bn1", norm(features));
  dropout = register_module("_dropout", torch::nn::Dropout(kDropout));
  fc = register_module("_fc", torch::nn::Linear(features, options.classes));
}

torch::Tensor EfficientNetLiteImpl::forward(torch::Tensor images) {
  torch::Tensor x = torch::relu6(bn0(stem(same_padded(images, 3, 2))));
  for (const auto& block : *blocks) x = block->as<InvertedResidualImpl>()->forward(x);
  x = torch::relu6(bn1(top(x)));
  return fc(dropout(x.mean({2, 3})));
}

}  // namespace image_models

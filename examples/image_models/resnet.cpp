#include "image_models/resnet.h"

#include <zeropage/check.h>

namespace image_models {
namespace {

constexpr int64_t kExpansion = 4;  // of a bottleneck

int64_t halved(int64_t side, int times) {
  for (int i = 0; i < times; ++i) side = (side + 1) / 2;
  return side;
}

// What a shortcut needs where sizes change.
void fill_downsample(torch::nn::Sequential& downsample, int64_t channels, int64_t channels_out,
                     int64_t stride) {
  if (stride == 1 && channels == channels_out) return;
  downsample->push_back(convolution(channels, channels_out, 1, stride));
  downsample->push_back(torch::nn::BatchNorm2d(channels_out));
}

torch::Tensor shortcut(torch::nn::Sequential& downsample, const torch::Tensor& x) {
  return downsample->is_empty() ? x : downsample->forward(x);
}

// The side of the square that the last stage gets.
int64_t last_map_side(const ResNetOptions& options) {
  return halved(options.model.image_side, options.stem == Stem::kLarge ? 4 : 2);
}

// Adds a stage's blocks; returns the channels that come out.
int64_t fill_stage(torch::nn::Sequential& layer, const ResNetOptions& options, size_t number,
                   int64_t channels) {
  const int64_t width = options.model.width << number;
  for (int64_t i = 0; i < options.depths[number]; ++i) {
    const int64_t stride = number > 0 && i == 0 ? 2 : 1;
    if (options.block == Block::kBasic) {
      layer->push_back(BasicBlock(channels, width, stride));
      channels = width;
      continue;
    }
    const int64_t side = last_map_side(options);
    layer->push_back(
        Bottleneck(BottleneckOptions{.channels = channels,
                                     .width = width,
                                     .stride = stride,
                                     .attention_heads = number == 3 ? options.attention_heads : 0,
                                     .map_side = i == 0 ? side : halved(side, 1)}));
    channels = width * kExpansion;
  }
  return channels;
}

}  // namespace

torch::nn::Conv2d convolution(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  torch::nn::Conv2d made(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
  const torch::NoGradGuard no_grad;
  torch::nn::init::kaiming_normal_(made->weight, 0, torch::kFanOut, torch::kReLU);
  return made;
}

ResNetOptions ResNetOptions::resnet18(const ModelOptions& model) {
  return {.model = model};
}

ResNetOptions ResNetOptions::resnet50(const ModelOptions& model) {
  return {.model = model, .block = Block::kBottleneck, .depths = {3, 4, 6, 3}};
}

ResNetOptions ResNetOptions::botnet50(const ModelOptions& model) {
  ResNetOptions options = resnet50(model);
  options.attention_heads = 4;
  return options;
}

BasicBlockImpl::BasicBlockImpl(int64_t channels, int64_t channels_out, int64_t stride) {
  conv1 = register_module("conv1", convolution(channels, channels_out, 3, stride));
  bn1 = register_module("bn1", torch::nn::BatchNorm2d(channels_out));
  conv2 = register_module("conv2", convolution(channels_out, channels_out, 3, 1));
  bn2 = register_module("bn2", torch::nn::BatchNorm2d(channels_out));
  fill_downsample(downsample, channels, channels_out, stride);
  register_module("downsample", downsample);
}

torch::Tensor BasicBlockImpl::forward(const torch::Tensor& x) {
  const torch::Tensor y = bn2(conv2(torch::relu(bn1(conv1(x)))));
  return torch::relu(y + shortcut(downsample, x));
}

BottleneckImpl::BottleneckImpl(const BottleneckOptions& options) {
  const int64_t width = options.width, channels_out = width * kExpansion;
  conv1 = register_module("conv1", convolution(options.channels, width, 1, 1));
  bn1 = register_module("bn1", torch::nn::BatchNorm2d(width));
  if (options.attention_heads == 0) {
    conv2 = register_module("conv2", convolution(width, width, 3, options.stride));
  } else {
    attention = register_module("attention",
                                SpatialAttention(width, options.attention_heads, options.map_side));
    if (options.stride > 1) {
      // An odd row at the edge becomes one of its own, as a convolution's does.
      pool = register_module("pool", torch::nn::AvgPool2d(torch::nn::AvgPool2dOptions(2)
                                                              .stride(options.stride)
                                                              .ceil_mode(true)
                                                              .count_include_pad(false)));
    }
  }
  bn2 = register_module("bn2", torch::nn::BatchNorm2d(width));
  conv3 = register_module("conv3", convolution(width, channels_out, 1, 1));
  bn3 = register_module("bn3", torch::nn::BatchNorm2d(channels_out));
  fill_downsample(downsample, options.channels, channels_out, options.stride);
  register_module("downsample", downsample);
}

torch::Tensor BottleneckImpl::forward(const torch::Tensor& x) {
  torch::Tensor y = torch::relu(bn1(conv1(x)));
  y = conv2.is_empty() ? attention(y) : conv2(y);
  if (!pool.is_empty()) y = pool(y);
  y = bn3(conv3(torch::relu(bn2(y))));
  return torch::relu(y + shortcut(downsample, x));
}

ResNetImpl::ResNetImpl(const ResNetOptions& options) {
  ResNetOptions given = options;
  if (given.model.width == 0) given.model.width = 64;
  const int64_t width = given.model.width;
  ZP_CHECK(width >= 1 && given.model.classes >= 1 && given.model.channels >= 1 &&
               given.model.image_side >= 1,
           "a ResNet: expected a width, classes, channels and an image side of at least 1, got ",
           width, ", ", given.model.classes, ", ", given.model.channels, " and ",
           given.model.image_side);
  const bool large = given.stem == Stem::kLarge;
  conv1 = register_module("conv1",
                          convolution(given.model.channels, width, large ? 7 : 3, large ? 2 : 1));
  bn1 = register_module("bn1", torch::nn::BatchNorm2d(width));
  if (large) {
    maxpool = register_module(
        "maxpool", torch::nn::MaxPool2d(torch::nn::MaxPool2dOptions(3).stride(2).padding(1)));
  }
  int64_t channels = width;
  size_t number = 0;
  for (torch::nn::Sequential* layer : {&layer1, &layer2, &layer3, &layer4}) {
    channels = fill_stage(*layer, given, number++, channels);
    register_module("layer" + std::to_string(number), *layer);
  }
  fc = register_module("fc", torch::nn::Linear(channels, given.model.classes));
}

torch::Tensor ResNetImpl::forward(torch::Tensor images) {
  torch::Tensor x = torch::relu(bn1(conv1(images)));
  if (!maxpool.is_empty()) x = maxpool(x);
  x = layer4->forward(layer3->forward(layer2->forward(layer1->forward(x))));
  return fc(x.mean({2, 3}));
}

}  // namespace image_models

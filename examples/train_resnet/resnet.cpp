#include "examples/train_resnet/resnet.h"

namespace train_resnet {
namespace {

torch::nn::Conv2d convolution(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  torch::nn::Conv2d made(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
  const torch::NoGradGuard no_grad;
  torch::nn::init::kaiming_normal_(made->weight, 0, torch::kFanOut, torch::kReLU);
  return made;
}

}  // namespace

BasicBlockImpl::BasicBlockImpl(int64_t channels, int64_t channels_out, int64_t stride) {
  conv1 = register_module("conv1", convolution(channels, channels_out, 3, stride));
  norm1 = register_module("norm1", torch::nn::BatchNorm2d(channels_out));
  conv2 = register_module("conv2", convolution(channels_out, channels_out, 3, 1));
  norm2 = register_module("norm2", torch::nn::BatchNorm2d(channels_out));
  if (stride != 1 || channels != channels_out) {
    shortcut->push_back(convolution(channels, channels_out, 1, stride));
    shortcut->push_back(torch::nn::BatchNorm2d(channels_out));
  }
  register_module("shortcut", shortcut);
}

torch::Tensor BasicBlockImpl::forward(const torch::Tensor& x) {
  const torch::Tensor y = norm2(conv2(torch::relu(norm1(conv1(x)))));
  return torch::relu(y + (shortcut->is_empty() ? x : shortcut->forward(x)));
}

ResNetImpl::ResNetImpl(const ResNetOptions& options) {
  stem = register_module("stem", convolution(options.channels, options.width, 3, 1));
  norm = register_module("norm", torch::nn::BatchNorm2d(options.width));
  int64_t channels = options.width;
  for (const int64_t times : {1, 2, 4, 8}) {
    const int64_t channels_out = options.width * times;
    stages->push_back(BasicBlock(channels, channels_out, times == 1 ? 1 : 2));
    stages->push_back(BasicBlock(channels_out, channels_out, 1));
    channels = channels_out;
  }
  register_module("stages", stages);
  head = register_module("head", torch::nn::Linear(channels, options.classes));
}

torch::Tensor ResNetImpl::forward(torch::Tensor x) {
  x = stages->forward(torch::relu(norm(stem(x))));
  return head(x.mean({2, 3}));
}

}  // namespace train_resnet

// Transforms of an image before a model sees it: augmentation for training, the same crop of every image in an
// evaluation.
//
//   const auto training = data::chain({data::random_crop(28, /*padding=*/4), data::random_flip(), data::normalise({0.5}, {0.25})});
//   auto input = training(images.image(sample), SampleRandom(seed, epoch, sample));  // [1, 28, 28] fp32
//
// Images are [channels, height, width]: uint8 from 0 to 255, or fp32 from 0 to 1. A transform leaves its argument as it is. Its random
// numbers are those of the sample in the epoch (zeropage/data/random.h) and of its place in the chain, so ranks, threads and resuming do not change
// them, nor does another transform in the chain that draws more.
//
// Threads: constant after construction, so any number may call. Throws c10::Error for other tensors and for options that
// make no sense, when the transform is made.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zeropage/data/random.h"

namespace zeropage::data {

using Transform = std::function<at::Tensor(const at::Tensor& image, SampleRandom random)>;

// One after the other; each draws numbers of its own. The result is contiguous fp32.
Transform chain(std::vector<Transform> transforms);

// A square of `side` pixels from anywhere in the image with `padding` black pixels around it.
Transform random_crop(int64_t side, int64_t padding);
// The square in the middle, as it is; `resize` before it where images are smaller.
Transform centre_crop(int64_t side);
// To a shorter side of so many pixels; bilinear, antialiased.
Transform resize(int64_t short_side);

// A rectangle with a share of the image's area and a ratio of sides, resized to a square (Szegedy et al. 2015). Where ten
// draws do not fit, the middle.
struct ResizedCrop {
  std::array<double, 2> area = {0.08, 1.0};
  std::array<double, 2> ratio = {3.0 / 4, 4.0 / 3};  // width to height, uniform in its logarithm
};
Transform random_resized_crop(int64_t side, const ResizedCrop& options = {});

// Left and right exchanged.
Transform random_flip(double probability = 0.5);

// Brightness, contrast and saturation, in this order, each times a factor from [1 - x, 1 + x], clamped to [0, 1]. Images
// of three channels.
struct ColourJitter {
  double brightness = 0;
  double contrast = 0;
  double saturation = 0;
};
Transform colour_jitter(const ColourJitter& options);

// (x - mean) / deviation by channel; one number each for all channels.
Transform normalise(std::vector<double> mean, std::vector<double> deviation);

// The image, or a smaller one. image: [channels, height, width] uint8.
at::Tensor with_short_side(const at::Tensor& image, int64_t short_side);

}  // namespace zeropage::data

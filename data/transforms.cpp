#include "zeropage/data/transforms.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ATen.h>

#include "zeropage/check.h"

namespace zeropage::data {
namespace {

void check_image(const char* who, const at::Tensor& image) {
  ZP_CHECK(image.dim() == 3 && image.numel() > 0 &&
               (image.scalar_type() == at::kByte || image.scalar_type() == at::kFloat),
           who, ": expected an image [channels, height, width] of uint8 or fp32, got ",
           image.scalar_type(), " ", image.sizes());
}

at::Tensor as_float(const at::Tensor& image) {
  return image.scalar_type() == at::kByte ? image.to(at::kFloat).div_(255) : image;
}

// image: [channels, height, width] fp32.
at::Tensor resized(const at::Tensor& image, int64_t height, int64_t width) {
  if (image.size(1) == height && image.size(2) == width) return image;
  return at::_upsample_bilinear2d_aa(image.unsqueeze(0), {height, width}, /*align_corners=*/false)
      .squeeze(0);
}

std::array<int64_t, 2> sizes_for(const at::Tensor& image, int64_t short_side) {
  const int64_t height = image.size(1), width = image.size(2), shorter = std::min(height, width);
  const auto scaled = [&](int64_t side) {
    return std::max<int64_t>(1, (side * short_side + shorter / 2) / shorter);
  };
  return {scaled(height), scaled(width)};
}

at::Tensor cropped(const at::Tensor& image, int64_t top, int64_t left, int64_t height,
                   int64_t width) {
  return image.narrow(1, top, height).narrow(2, left, width);
}

at::Tensor middle(const at::Tensor& image, int64_t height, int64_t width) {
  return cropped(image, (image.size(1) - height) / 2, (image.size(2) - width) / 2, height, width);
}

void check_side(const char* who, int64_t side) {
  ZP_CHECK(side >= 1, who, ": expected a side of at least 1, got ", side);
}

// Where a draw fits in the image: its crop; else undefined.
at::Tensor try_crop(const at::Tensor& image, const ResizedCrop& options, SampleRandom& random) {
  const auto area = static_cast<double>(image.size(1) * image.size(2)) *
                    random.uniform(options.area[0], options.area[1]);
  const double ratio =
      std::exp(random.uniform(std::log(options.ratio[0]), std::log(options.ratio[1])));
  const auto width = static_cast<int64_t>(std::llround(std::sqrt(area * ratio)));
  const auto height = static_cast<int64_t>(std::llround(std::sqrt(area / ratio)));
  if (width < 1 || height < 1 || width > image.size(2) || height > image.size(1)) return {};
  const int64_t top = random.below(image.size(1) - height + 1);
  const int64_t left = random.below(image.size(2) - width + 1);
  return cropped(image, top, left, height, width);
}

// The middle of an image that is too narrow or too flat for any ratio.
at::Tensor widest_crop(const at::Tensor& image, const ResizedCrop& options) {
  const int64_t height = image.size(1), width = image.size(2);
  const auto times = [](int64_t side, double factor) {
    return std::max<int64_t>(1, std::llround(static_cast<double>(side) * factor));
  };
  return middle(image, std::min(height, times(width, 1 / options.ratio[0])),
                std::min(width, times(height, options.ratio[1])));
}

// [1, height, width]: what the eye takes for brightness (ITU-R BT.601).
at::Tensor grey(const at::Tensor& image) {
  return (image[0] * 0.299 + image[1] * 0.587 + image[2] * 0.114).unsqueeze(0);
}

}  // namespace

at::Tensor with_short_side(const at::Tensor& image, int64_t short_side) {
  check_image("with_short_side()", image);
  if (std::min(image.size(1), image.size(2)) <= short_side) return image;
  const auto [height, width] = sizes_for(image, short_side);
  return resized(image.to(at::kFloat), height, width).round_().clamp_(0, 255).to(at::kByte);
}

Transform chain(std::vector<Transform> transforms) {
  return [transforms = std::move(transforms)](const at::Tensor& image, SampleRandom random) {
    check_image("a transform", image);
    at::Tensor changed = image;
    // A stream each, however many numbers the others draw.
    for (size_t place = 0; place < transforms.size(); ++place) {
      changed = transforms[place](changed, random.of(place));
    }
    return as_float(changed).contiguous();
  };
}

Transform random_crop(int64_t side, int64_t padding) {
  check_side("random_crop()", side);
  ZP_CHECK(padding >= 0, "random_crop(): expected a padding of at least 0, got ", padding);
  return [side, padding](const at::Tensor& image, SampleRandom random) {
    const at::Tensor padded =
        padding == 0 ? image : at::constant_pad_nd(image, {padding, padding, padding, padding}, 0);
    ZP_CHECK(padded.size(1) >= side && padded.size(2) >= side, "random_crop(): cannot cut ", side,
             " x ", side, " from an image ", image.sizes(), " with a padding of ", padding,
             "; resize() it first");
    const int64_t top = random.below(padded.size(1) - side + 1);
    const int64_t left = random.below(padded.size(2) - side + 1);
    return cropped(padded, top, left, side, side);
  };
}

Transform centre_crop(int64_t side) {
  check_side("centre_crop()", side);
  return [side](const at::Tensor& image, SampleRandom) {
    ZP_CHECK(image.size(1) >= side && image.size(2) >= side, "centre_crop(): cannot cut ", side,
             " x ", side, " from an image ", image.sizes(), "; resize() it first");
    return middle(image, side, side);
  };
}

Transform resize(int64_t short_side) {
  check_side("resize()", short_side);
  return [short_side](const at::Tensor& image, SampleRandom) {
    const auto [height, width] = sizes_for(image, short_side);
    return resized(as_float(image), height, width);
  };
}

Transform random_resized_crop(int64_t side, const ResizedCrop& options) {
  check_side("random_resized_crop()", side);
  ZP_CHECK(0 < options.area[0] && options.area[0] <= options.area[1] && options.area[1] <= 1 &&
               0 < options.ratio[0] && options.ratio[0] <= options.ratio[1],
           "random_resized_crop(): expected an area within (0, 1] and a positive ratio, each from "
           "low to high, got ",
           options.area[0], " to ", options.area[1], " and ", options.ratio[0], " to ",
           options.ratio[1]);
  return [side, options](const at::Tensor& image, SampleRandom random) {
    constexpr int kTries = 10;
    at::Tensor crop;
    for (int i = 0; i < kTries && !crop.defined(); ++i) crop = try_crop(image, options, random);
    if (!crop.defined()) crop = widest_crop(image, options);
    return resized(as_float(crop), side, side);
  };
}

Transform random_flip(double probability) {
  ZP_CHECK(probability >= 0 && probability <= 1,
           "random_flip(): expected a probability from 0 to 1, got ", probability);
  return [probability](const at::Tensor& image, SampleRandom random) {
    return random.coin(probability) ? image.flip(2) : image;
  };
}

Transform colour_jitter(const ColourJitter& options) {
  for (const double strength : {options.brightness, options.contrast, options.saturation}) {
    ZP_CHECK(strength >= 0 && strength <= 1,
             "colour_jitter(): expected strengths from 0 to 1, got ", strength);
  }
  return [options](const at::Tensor& image, SampleRandom random) {
    ZP_CHECK(image.size(0) == 3, "colour_jitter(): expected an image of three channels, got ",
             image.sizes());
    const auto factor = [&](double strength) { return random.uniform(1 - strength, 1 + strength); };
    at::Tensor changed = as_float(image) * factor(options.brightness);
    changed.clamp_(0, 1);
    const auto blend = [&](const at::Tensor& with, double share) {
      changed = (changed * share + with * (1 - share)).clamp_(0, 1);
    };
    blend(grey(changed).mean(), factor(options.contrast));
    blend(grey(changed), factor(options.saturation));
    return changed;
  };
}

Transform normalise(std::vector<double> mean, std::vector<double> deviation) {
  ZP_CHECK(!mean.empty() && mean.size() == deviation.size() &&
               std::all_of(deviation.begin(), deviation.end(), [](double x) { return x > 0; }),
           "normalise(): expected as many means as deviations above 0, got ", mean.size(), " and ",
           deviation.size());
  const auto by_channel = [](const std::vector<double>& numbers) {
    return at::tensor(numbers, at::kFloat).view({-1, 1, 1});
  };
  return [mean = by_channel(mean), deviation = by_channel(deviation)](const at::Tensor& image,
                                                                      SampleRandom) {
    ZP_CHECK(mean.size(0) == 1 || mean.size(0) == image.size(0), "normalise(): has ", mean.size(0),
             " means, the image ", image.sizes(), " has other channels");
    return (as_float(image) - mean).div_(deviation);
  };
}

}  // namespace zeropage::data

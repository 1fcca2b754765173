// What the image models have in common: a module from images to the scores of classes.
#pragma once

#include <cstdint>
#include <string>

#include <torch/nn/module.h>

namespace image_models {

class ImageModel : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
  // [batch, channels, height, width] -> [batch, classes]
  virtual torch::Tensor forward(torch::Tensor images) = 0;
  // The layer that makes scores: its name, without "." and what is behind. Its weights belong to the classes, so fine-tuning on others
  // begins it anew.
  virtual std::string head() const = 0;
};

// What a model is made for. A model that cannot be had so throws c10::Error.
struct ModelOptions {
  int64_t classes = 1000;
  int64_t channels = 3;      // of an image
  int64_t image_side = 224;  // pixels; for models whose parameters depend on it
  // Channels of the first stage, of which the others follow. 0: as published.
  int64_t width = 0;
};

}  // namespace image_models

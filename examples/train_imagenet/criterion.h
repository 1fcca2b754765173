// The loss that training minimises: cross-entropy with smoothed labels, of images that may be mixed in pairs (Zhang et al. 2018, "mixup").
#pragma once

#include <cstdint>

#include <torch/torch.h>
#include <zeropage/data/random.h>

namespace train_imagenet {

class Criterion {
 public:
  struct Options {
    double label_smoothing = 0;
    double mixup = 0;  // alpha; 0: images are not mixed
  };
  explicit Criterion(const Options& options) : options_(options) {}

  // How much of an image stays, of Beta(alpha, alpha); 1 where nothing is mixed.
  double draw_share(zeropage::data::SampleRandom random) const;
  // Each image with its partner, which is the one as far from the batch's end as it is from the beginning.
  static torch::Tensor mix(const torch::Tensor& images, double share);
  // The mean over the batch. outputs: of mixed images, [batch, classes] fp32; labels: [batch] of the images before.
  torch::Tensor operator()(const torch::Tensor& outputs, const torch::Tensor& labels,
                           double share) const;

 private:
  Options options_;
};

}  // namespace train_imagenet

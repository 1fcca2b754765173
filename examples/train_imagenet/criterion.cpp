#include "train_imagenet/criterion.h"

#include <cmath>

namespace train_imagenet {

// By Jöhnk's method, which needs nothing but uniform numbers, so that any machine draws the same.
double Criterion::draw_share(zeropage::data::SampleRandom random) const {
  if (options_.mixup == 0) return 1;
  while (true) {
    const double a = std::pow(random.uniform(), 1 / options_.mixup);
    const double b = std::pow(random.uniform(), 1 / options_.mixup);
    // Where alpha is small, both may be 0.
    if (a + b > 0 && a + b <= 1) return a / (a + b);
  }
}

torch::Tensor Criterion::mix(const torch::Tensor& images, double share) {
  return share == 1 ? images : images * share + images.flip(0) * (1 - share);
}

torch::Tensor Criterion::operator()(const torch::Tensor& outputs, const torch::Tensor& labels,
                                    double share) const {
  const auto loss = [&](const torch::Tensor& of) {
    return torch::nn::functional::cross_entropy(
        outputs, of,
        torch::nn::functional::CrossEntropyFuncOptions().label_smoothing(options_.label_smoothing));
  };
  return share == 1 ? loss(labels) : loss(labels) * share + loss(labels.flip(0)) * (1 - share);
}

}  // namespace train_imagenet

// Loss, top-1 and top-5 over the samples of all ranks. They are sums of whole numbers, a loss in units of 2^-32, so they do not
// depend on who added what to what: not on the number of ranks, and not on how samples lie in batches.
#pragma once

#include <array>
#include <cstdint>

#include <torch/torch.h>
#include <zeropage/names.h>

namespace train_imagenet {

class Score {
 public:
  // outputs: [batch, classes] fp32, labels: [batch] int64. A sample whose outputs are not finite is wrong. Of two classes with the same
  // output the one with the lower number comes first.
  void add(const torch::Tensor& outputs, const torch::Tensor& labels);
  // Collective; the same on all ranks.
  Score over_ranks(const zeropage::World& world) const;

  int64_t samples() const { return sums_[kSamples]; }
  // Means over the samples; 0 where there are none. The mean loss is NaN where a loss was not finite, or past a million.
  double loss() const;
  double top1() const { return share(kTop1); }
  double top5() const { return share(kTop5); }

 private:
  enum Sum : uint8_t { kSamples, kTop1, kTop5, kLoss, kNotFinite, kSums };
  double share(Sum sum) const;

  std::array<int64_t, kSums> sums_ = {};
};

}  // namespace train_imagenet

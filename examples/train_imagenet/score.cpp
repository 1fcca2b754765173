#include "train_imagenet/score.h"

#include <limits>

namespace train_imagenet {
namespace {

constexpr double kUnits = 4294967296.0;  // of a loss of 1
constexpr double kLargestLoss = 1e6;
constexpr int64_t kTop = 5;

}  // namespace

void Score::add(const torch::Tensor& outputs, const torch::Tensor& labels) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor own = outputs.gather(1, labels.unsqueeze(1));  // [batch, 1]
  const torch::Tensor classes = torch::arange(outputs.size(1), labels.options());
  const torch::Tensor before =
      outputs.gt(own).logical_or(outputs.eq(own).logical_and(classes.lt(labels.unsqueeze(1))));
  const torch::Tensor finite = outputs.isfinite().all(1);  // [batch]
  const torch::Tensor place = before.sum(1);
  const auto count = [](const torch::Tensor& where) { return where.sum().item<int64_t>(); };

  const torch::Tensor losses = torch::nn::functional::cross_entropy(
      outputs.to(torch::kDouble), labels,
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
  const torch::Tensor usable = losses.isfinite().logical_and(losses.lt(kLargestLoss));
  const torch::Tensor units = losses.where(usable, torch::zeros_like(losses)).mul(kUnits).round();

  sums_[kSamples] += labels.size(0);
  sums_[kTop1] += count(finite.logical_and(place.lt(1)));
  sums_[kTop5] += count(finite.logical_and(place.lt(kTop)));
  sums_[kLoss] += count(units.to(torch::kLong));
  sums_[kNotFinite] += count(usable.logical_not());
}

Score Score::over_ranks(const zeropage::World& world) const {
  const torch::Tensor mine =
      torch::tensor(at::ArrayRef<int64_t>(sums_.data(), sums_.size()), torch::kLong)
          .to(world.device());
  const torch::Tensor all = world.sum(mine).cpu();
  Score score;
  for (size_t i = 0; i < sums_.size(); ++i) {
    score.sums_[i] = all[static_cast<int64_t>(i)].item<int64_t>();
  }
  return score;
}

double Score::share(Sum sum) const {
  if (samples() == 0) return 0;
  return static_cast<double>(sums_[sum]) / static_cast<double>(samples());
}

double Score::loss() const {
  if (sums_[kNotFinite] > 0) return std::numeric_limits<double>::quiet_NaN();
  return share(kLoss) / kUnits;
}

}  // namespace train_imagenet

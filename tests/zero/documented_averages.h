// The averages of parameters in docs/metrics_and_shards.md, which shows what is between the marks.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "zero/zeropage.h"

namespace zeropage::documented {

// [shards]
// An exponential moving average in fp32 of what this rank owns: 4 P / N bytes.
class ShardAverage {
 public:
  ShardAverage(zeropage::DistributedDataParallelBase& model, double decay)
      : model_(model), decay_(decay) {
    begin();
  }

  // From what the model has now: also after load_weights() of a saved average.
  void begin() {
    zeropage::visit_owned_shards(model_, [this](const zeropage::OwnedShard& shard) {
      average_[shard.name] = in_fp32(shard);
    });
  }

  // After each optimizer.step(). Sends nothing.
  void update() {
    zeropage::visit_owned_shards(model_, [this](const zeropage::OwnedShard& shard) {
      average_.at(shard.name).lerp_(shard.exact.to(torch::kFloat), 1 - decay_);
    });
  }

  // The model has the average from here on, and the average is kept as the model was: before an evaluation or
  // a save_weights(), and again after it. On all ranks.
  void swap() {
    zeropage::assign_owned_shards(model_, [this](const zeropage::OwnedShard& shard) {
      return std::exchange(average_.at(shard.name), in_fp32(shard));
    });
  }

 private:
  static torch::Tensor in_fp32(const zeropage::OwnedShard& shard) {
    return shard.exact.to(torch::kFloat, /*non_blocking=*/false, /*copy=*/true);
  }

  zeropage::DistributedDataParallelBase& model_;
  const double decay_;
  std::map<std::string, torch::Tensor> average_;
};
// [/shards]

// [whole]
// The same of whole parameters: 4 P bytes on each rank, and at stage 3 a gather of every page an update.
class WholeAverage {
 public:
  WholeAverage(zeropage::DistributedDataParallelBase& model, double decay)
      : model_(model), decay_(decay) {
    const torch::NoGradGuard no_grad;
    for (const torch::Tensor& parameter : model_.parameters()) {
      average_.push_back(parameter.to(torch::kFloat, /*non_blocking=*/false, /*copy=*/true));
    }
  }

  // After each optimizer.step(), on all ranks.
  void update() {
    const torch::NoGradGuard no_grad;
    const std::vector<torch::Tensor> parameters = model_.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      average_[i].lerp_(parameters[i].to(torch::kFloat), 1 - decay_);
    }
  }

  const std::vector<torch::Tensor>& values() const { return average_; }

 private:
  zeropage::DistributedDataParallelBase& model_;
  const double decay_;
  std::vector<torch::Tensor> average_;
};
// [/whole]

}  // namespace zeropage::documented

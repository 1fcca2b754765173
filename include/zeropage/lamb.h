// `Lamb`, an optimizer for large batches, that LibTorch does not have.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include "zeropage/detail/optimizer_traits.h"

namespace zeropage {

struct LambOptions : public torch::optim::OptimizerCloneableOptions<LambOptions> {
  using betas_t = std::tuple<double, double>;

  LambOptions(double lr = 1e-3);  // implicit, as torch::optim's options are

  // At least 0.
  TORCH_ARG(double, lr) = 1e-3;
  // Each in [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-6;
  // Added to the direction, times the value; at least 0.
  TORCH_ARG(double, weight_decay) = 0.01;
  // Whether the step is as long as the parameter is large. Without it the update is AdamW's with the decay in its
  // direction: for biases and norms, say.
  TORCH_ARG(bool, trust_ratio) = true;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;

  friend bool operator==(const LambOptions& one, const LambOptions& other);
};

// Throws unless the options are in range.
void check_options(const LambOptions& options);

// The optimizer LAMB (You et al. 2019, arXiv:1904.00962, algorithm 2) as a class of torch::optim:
//
//   exp_avg, exp_avg_sq = Adam's (Kingma and Ba 2015), corrected for their beginning
//   direction = exp_avg / (sqrt(exp_avg_sq) + eps) + weight_decay value
//   value = value - lr |value| / |direction| direction             // over the parameter; 1 where a norm is 0
//
// Sharded, the norms are added over ranks exactly, so a parameter's bits do not depend on how it is cut.
// Parameters and threads: as zeropage::Muon's. Throws c10::Error on options out of range and on sparse gradients.
class Lamb : public torch::optim::Optimizer {
 public:
  explicit Lamb(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                const LambOptions& defaults = {});
  explicit Lamb(std::vector<torch::Tensor> parameters, const LambOptions& defaults = {})
      : Lamb({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

  // Steps parameters that have a gradient. Returns the closure's loss, or an undefined tensor.
  torch::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

template <>
struct OptimizerTraits<Lamb> {
  using Options = LambOptions;
  static constexpr UpdateReads kReads = UpdateReads::kSums;
};

}  // namespace zeropage

// The optimizer Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms",
// arXiv:2302.06675, algorithm 2) as a class of torch::optim:
//
//   update = sign(beta1 exp_avg + (1 - beta1) gradient)
//   value = value (1 - lr weight_decay) - lr update
//   exp_avg = beta2 exp_avg + (1 - beta2) gradient
//
// One state of the parameter's dtype, half of Adam's. Its updates are all of size lr: take a
// learning rate 3 to 10 times smaller than AdamW's, and a weight decay as much larger.
//
// Contiguous fp32 parameters take the fused step (offload/fused_step.h); others, and those on a
// device without one, LibTorch's operators, whose fp32 results are within a few ulp.
// Lifetime and threads: as any torch::optim class. Throws c10::Error on options out of range, on
// sparse gradients, and what the closure throws.
#pragma once

#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include "offload/lion_options.h"

namespace zeropage {

struct LionParamState : public torch::optim::OptimizerCloneableParamState<LionParamState> {
  TORCH_ARG(torch::Tensor, exp_avg);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;

  friend bool operator==(const LionParamState& one, const LionParamState& other);
};

class Lion : public torch::optim::Optimizer {
 public:
  explicit Lion(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                const LionOptions& defaults = {});
  explicit Lion(std::vector<torch::Tensor> parameters, const LionOptions& defaults = {})
      : Lion({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

  // Steps parameters that have a gradient. Returns the closure's loss, or an undefined tensor.
  torch::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  LionParamState& state_of(const torch::Tensor& parameter);
};

}  // namespace zeropage

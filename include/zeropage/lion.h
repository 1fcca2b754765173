// `Lion`, an optimizer that LibTorch does not have.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

// The options of Lion (zeropage/lion.h).

namespace zeropage {

struct LionOptions : public torch::optim::OptimizerCloneableOptions<LionOptions> {
  using betas_t = std::tuple<double, double>;

  LionOptions(double lr = 1e-4);  // implicit, as torch::optim's options are

  // Every update's size; at least 0.
  TORCH_ARG(double, lr) = 1e-4;
  // How much of the average goes into the update, and how much is kept; each in [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.99);
  // Decay of the value, apart from the gradient, times lr; at least 0.
  TORCH_ARG(double, weight_decay) = 0;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;

  friend bool operator==(const LionOptions& one, const LionOptions& other);
};

// Throws unless the options are in range.
void check_options(const LionOptions& options);

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
// Contiguous fp32 parameters take the fused step (optim/fused_step.h); others, and those on a
// device without one, LibTorch's operators, whose fp32 results are within a few ulp.
// Lifetime and threads: as any torch::optim class. Throws c10::Error on options out of range, on
// sparse gradients, and what the closure throws.
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

// The options of Lion (offload/lion.h).
#pragma once

#include <tuple>

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

namespace zeropage {

struct LionOptions : public torch::optim::OptimizerCloneableOptions<LionOptions> {
  using betas_t = std::tuple<double, double>;

  LionOptions(double lr = 1e-4);  // NOLINT(google-explicit-constructor): as torch::optim's

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

}  // namespace zeropage

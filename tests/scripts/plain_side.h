// A script by LibTorch alone: one copy of the module, in double, on one rank. What the ranks of `data` do with
// their samples is done one after the other, and gradients are the mean.
#pragma once

#include "tests/scripts/side.h"

namespace zeropage::scripts {

class PlainSide final : public Side {
 public:
  explicit PlainSide(const Script& script);

  // All actions.
  Observations see_all();

 private:
  bool backward(const Action& action, bool syncs) override;
  void micro_batches(int count, int units) override;
  void accumulated_step() override;
  void abandon() override;
  void look_at_mean() override;
  void throw_in_forward(int unit) override;
  torch::Tensor evaluate() override;
  double clip(double most, bool by_torch) override;
  void write_guarded(torch::Tensor parameter, double factor) override;
  void write_alike(torch::Tensor parameter, double factor) override {
    write_guarded(std::move(parameter), factor);
  }
  void step_optimizers() override;
  void see_values() override;
  void average() override;
  torch::Tensor evaluate_average() override;
  double share_of_own_value() const override { return 0.5 * (1 + setting_.shares()); }
  void update_balance() override;
  bool is_odd_one() const override { return false; }

  torch::Tensor loss_of(const torch::Tensor& outputs, const Sample& sample) const;

  // Calls it for each rank that has samples of its own. The buffers are rank 0's in the end, which DistributedDataParallel promises.
  template <typename Forward>
  void on_each_rank(const Forward& forward);

  std::vector<torch::Tensor> average_;  // by parameter
  // The step that is made with the next one has these gradients, by parameter, and rates, by group.
  std::vector<torch::Tensor> late_;
  std::vector<double> late_rates_;
  // Sums over the open step's micro-batches: those of all ranks, and those of the first rank.
  double weight_ = 0, weight_of_0_ = 0, loss_of_0_ = 0;
  bool is_mean_ = false;  // its gradients are divided by their weight
};

}  // namespace zeropage::scripts

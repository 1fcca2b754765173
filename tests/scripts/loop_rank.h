// A rank whose training loop has the whole module: what is the same with the wrapper and without it.
#pragma once

#include <optional>

#include "tests/scripts/our_rank.h"

namespace zeropage::scripts {

class LoopRank : public OurRank {
 protected:
  using OurRank::OurRank;

  // The module, or the wrapped one.
  virtual torch::Tensor outputs(const Sample& sample, int units) = 0;
  virtual NoSync no_sync() = 0;
  virtual void set_training(bool is_on) = 0;

  void make_accumulator() {
    if (script_.accumulation.is_on) accumulator_.emplace(model(), accumulator_options());
  }

 private:
  torch::Tensor forward(const Sample& sample, int units);
  bool backward(const Action& action, bool syncs) override;
  void micro_batches(int count, int units) override;
  void train_on() override;
  StepReport step_all() override;
  torch::Tensor loss() const override { return accumulator_->loss(); }
  void abandon() override { accumulator_->abandon(); }
  void throw_in_forward(int unit) override;
  torch::Tensor evaluate() override;

  std::optional<Accumulator> accumulator_;
};

}  // namespace zeropage::scripts

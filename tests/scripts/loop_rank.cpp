#include "tests/scripts/loop_rank.h"

#include <string>

namespace zeropage::scripts {

torch::Tensor LoopRank::forward(const Sample& sample, int units) {
  return forward_under([&] { return outputs(sample, units); });
}

bool LoopRank::backward(const Action& action, bool syncs) {
  if (!syncs) {
    const NoSync guard = no_sync();
    return backward(action, /*syncs=*/true);
  }
  const Sample given = sample(script_.seed, rank());
  const torch::Tensor loss = loss_of(forward(given, units_of(action)), given) * action.value;
  if (!loss.requires_grad()) return false;
  if (action.does == Does::kBackwardTwice) loss.backward({}, /*keep_graph=*/true);
  loss.backward();
  return true;
}

void LoopRank::micro_batches(int count, int units) {
  if (accumulator_->micro_step() == 0) {
    accumulator_->set_micro_steps(micro_batches_ahead() * setting_.spread);
  }
  for (int micro_batch = 0; micro_batch < count; ++micro_batch, ++pass_) {
    for (int of_rank = 0; of_rank < setting_.spread; ++of_rank) {
      const int number = rank() * setting_.spread + of_rank;
      const Sample given = sample(script_.seed, number);
      torch::Tensor loss = loss_of(forward(given, units), given) * factor_of(pass_, number);
      // Where all is frozen; one that nothing trains is refused.
      if (!loss.requires_grad()) loss = loss.detach().requires_grad_(true);
      accumulator_->backward(loss, weight_of(pass_, number));
    }
  }
}

void LoopRank::train_on() {
  // Its masks are the script's, too.
  if (scripts::has(script_, Kind::kMasked)) return;
  module_->zero_grad();
  const Sample given = sample(script_.seed, rank());
  const torch::Tensor loss = loss_of(forward(given, static_cast<int>(script_.units.size())), given);
  if (!loss.requires_grad()) return;
  if (accumulator_) {
    accumulator_->set_micro_steps(1);
    accumulator_->backward(loss);
    step_all();
  } else {
    loss.backward();
    for (auto& optimizer : optimizers_) optimizer->step();
  }
}

StepReport LoopRank::step_all() {
  if (optimizers_.size() == 1) return accumulator_->step(*optimizers_[0]);
  return accumulator_->step(*optimizers_[0], *optimizers_[1]);
}

void LoopRank::throw_in_forward(int unit) {
  module_->throw_behind(unit);
  try {
    forward(sample(script_.seed, rank()), static_cast<int>(script_.units.size()));
  } catch (const std::runtime_error& error) {
    if (std::string(error.what()) != "thrown on purpose") throw;
  }
  // What it has added is of no backward.
  module_->auxiliary_loss();
}

torch::Tensor LoopRank::evaluate() {
  const torch::NoGradGuard no_grad;
  set_training(false);
  const torch::Tensor outputs =
      forward(sample(script_.seed + 1, 0), static_cast<int>(script_.units.size()));
  set_training(true);
  return of_all_rows(outputs);
}

}  // namespace zeropage::scripts

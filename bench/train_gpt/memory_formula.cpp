#include "bench/train_gpt/memory_formula.h"

#include "bench/train_gpt/model.h"

namespace train_gpt {

double state_tensors(const Flags& flags) {
  const std::string& optimizer = flags.optimizer;
  if (optimizer == "sgd") return 0;
  if (optimizer == "adagrad" || optimizer == "lion") return 1;
  if (optimizer != "muon") return 2;
  // Muon has one of the blocks' matrices, and AdamW two of the others.
  constexpr int64_t kSquaresOfABlock = 12;
  const int64_t matrices =
      flags.model.layers * kSquaresOfABlock * flags.model.d_model * flags.model.d_model;
  return 2 - static_cast<double>(matrices) / static_cast<double>(parameters_of(flags.model));
}

zeropage::memory::TierBytes memory_formula(const Flags& flags, int64_t parameters, int world_size) {
  return zeropage::zero::formula_bytes(flags.options, parameters, world_size, state_tensors(flags));
}

int64_t gradient_formula(const Flags& flags, int64_t parameters, int world_size) {
  return zeropage::zero::formula_gradient_bytes(flags.options, parameters, world_size);
}

}  // namespace train_gpt

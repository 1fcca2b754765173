#include "bench/train_gpt/memory_formula.h"

#include "bench/train_gpt/expert_layers.h"
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
  return 2 - static_cast<double>(matrices) / static_cast<double>(parameters_of(flags));
}

namespace {

// What a rank has of experts that are cut over ranks.
int64_t own_experts(const Flags& flags) {
  if (!flags.experts_are_cut) return 0;
  return parameters_of_experts(flags, flags.experts.experts / flags.experts.parallel) -
         parameters_of_experts(flags, /*experts=*/0);
}

}  // namespace

zeropage::memory::TierBytes memory_formula(const Flags& flags, int64_t parameters, int world_size) {
  const auto formula = [&](int64_t numel, int ranks) {
    return zeropage::zero::formula_bytes(flags.options, numel, ranks, state_tensors(flags));
  };
  const int64_t experts = own_experts(flags);
  zeropage::memory::TierBytes bytes = formula(parameters - experts, world_size);
  // Fewer ranks share them.
  if (experts > 0) bytes += formula(experts, world_size / flags.experts.parallel);
  return bytes;
}

int64_t gradient_formula(const Flags& flags, int64_t parameters, int world_size) {
  const auto formula = [&](int64_t numel, int ranks) {
    return zeropage::zero::formula_gradient_bytes(flags.options, numel, ranks);
  };
  const int64_t experts = own_experts(flags);
  const int64_t of_experts =
      experts > 0 ? formula(experts, world_size / flags.experts.parallel) : 0;
  return formula(parameters - experts, world_size) + of_experts;
}

}  // namespace train_gpt

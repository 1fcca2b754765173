#include "bench/train_gpt/memory_formula.h"

namespace train_gpt {

int64_t state_tensors(const std::string& optimizer) {
  if (optimizer == "sgd") return 0;
  return optimizer == "adagrad" || optimizer == "lion" ? 1 : 2;
}

zeropage::memory::TierBytes memory_formula(const Flags& flags, int64_t parameters, int world_size) {
  return formula_bytes(flags.options, parameters, world_size, state_tensors(flags.optimizer));
}

int64_t gradient_formula(const Flags& flags, int64_t parameters, int world_size) {
  return formula_gradient_bytes(flags.options, parameters, world_size);
}

}  // namespace train_gpt

#include "examples/train_gpt/memory_formula.h"

#include <c10/core/ScalarType.h>

namespace train_gpt {

using zeropage::memory::Breakdown;
using zeropage::memory::Kind;
using zeropage::memory::Tier;

int64_t state_tensors(const std::string& optimizer) {
  if (optimizer == "sgd") return 0;
  return optimizer == "adagrad" || optimizer == "lion" ? 1 : 2;
}

MemoryFormula memory_formula(const Flags& flags, int64_t parameters, int world_size) {
  MemoryFormula formula;
  const auto in = [&](Tier tier) -> Breakdown& {
    if (tier == Tier::kDevice) return formula.device;
    return tier == Tier::kHost ? formula.host : formula.nvme;
  };
  const zeropage::OffloadOptions& offload = flags.options.offload;
  const bool optimizer_leaves = offload.optimizer != Tier::kDevice;
  const bool parameters_leave = offload.parameters != Tier::kDevice;
  const bool is_fp32 = flags.dtype() == torch::kFloat32;
  const zeropage::Stage& stage = flags.options.stage;
  const auto share = [&](bool is_sharded) { return is_sharded ? world_size : 1; };
  const auto bytes_of = [&](c10::ScalarType dtype) {
    return static_cast<int64_t>(c10::elementSize(dtype)) * parameters;
  };

  in(offload.parameters)[Kind::kParameter] = bytes_of(flags.dtype()) / share(stage.parameters);
  const int64_t state_bytes = zeropage::offload::state_bytes(flags.options.optimizer_state,
                                                             /*first_in_block=*/0, parameters);
  in(offload.optimizer)[Kind::kOptimizerState] =
      state_bytes * state_tensors(flags.optimizer) / share(stage.optimizer_state);
  // Of fp32 parameters that stay the step away from them needs a copy.
  const int64_t copy_bytes =
      is_fp32 && optimizer_leaves && !parameters_leave ? static_cast<int64_t>(sizeof(float)) : 0;
  in(offload.optimizer)[Kind::kMasterWeights] =
      (flags.master_bytes() + copy_bytes) * parameters / share(stage.optimizer_state);
  const int64_t gradient_bytes = bytes_of(accumulate_dtype_of(flags.options, flags.dtype()));
  if (optimizer_leaves)
    formula.host[Kind::kGradient] = gradient_bytes / share(stage.optimizer_state);
  if (!optimizer_leaves || !stage.gradients) {
    formula.device[Kind::kGradient] = gradient_bytes / share(stage.gradients);
  }
  return formula;
}

}  // namespace train_gpt

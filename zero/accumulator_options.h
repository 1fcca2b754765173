// What an accumulator may be asked for (zero/accumulator.h).
#pragma once

#include <cstdint>
#include <optional>

#include "accumulate/loss_scaler.h"
#include "accumulate/norm_spikes.h"

namespace zeropage {

// When the gradients of micro-steps are reduced over ranks. G: bytes of all gradients.
enum class ReduceMicroSteps : uint8_t {
  // kOnce if whole gradients in accumulate_dtype fit gradient_budget_bytes; otherwise, and without
  // a budget, kEach. The stage does not matter, so bits do not depend on it. kOnce on a rank that shares the model
  // with no other and keeps its gradients on the device, where both have the same bits. All stages of a pipeline do
  // kEach if one of them would.
  kAuto,
  // The gradients of each micro-step are reduced into what this rank owns: k reductions of G.
  // Memory as without accumulation; at stages 0 and 1 what a rank owns once more.
  kEach,
  // Whole gradients add up on each rank: one reduction of G, and at stages 2 and 3 G bytes. At
  // stages 0 and 1, where they are whole anyway, it costs nothing.
  kOnce,
};

// What step() does before the last micro-step.
enum class IncompleteStep : uint8_t {
  kRefuse,
  kWarn,  // and makes the step of the micro-batches so far: the same number on all ranks
};

struct AccumulatorOptions {
  // Micro-batches of a step on each rank; the same on all ranks.
  int64_t micro_steps = 1;
  ReduceMicroSteps reduce = ReduceMicroSteps::kAuto;
  int64_t gradient_budget_bytes = 0;  // 0: none
  IncompleteStep incomplete = IncompleteStep::kRefuse;

  // The largest norm of the mean gradient, over all parameters. Above 0.
  std::optional<double> clip_norm;
  // The largest element of the mean gradient, by magnitude. Above 0; not with clip_norm. Costs a
  // pass over the gradients.
  std::optional<double> clip_value;

  // Unset: for fp16 a dynamic scale with its defaults, otherwise none.
  std::optional<accumulate::LossScalerOptions> loss_scaler;
  // Unset: norms are not judged.
  std::optional<accumulate::NormSpikeOptions> norm_spikes;
};

}  // namespace zeropage

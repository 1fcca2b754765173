// Which experts each token takes, and with which weights.
#pragma once

#include <cstdint>

#include <ATen/core/TensorBody.h>

#include "fused/experts/expert_linear.h"
#include "fused/experts/token_copies.h"
#include "zeropage/experts.h"

namespace zeropage::fused {

struct Routing {
  at::Tensor probabilities;  // [tokens, experts], of sum 1, with a gradient
  at::Tensor weights;        // [tokens, active], with a gradient
  at::Tensor load;           // [experts], int64: choices of each, dropped ones too
  CopyOrder order;           // by expert, and within an expert by token; dropped copies last
  at::Tensor kept;           // [experts], int64: those of them that are not dropped
  ExpertRows rows;
};

// scores: [tokens, experts], fp32 or fp64: the router's, before options.scoring. bias: [experts], or undefined.
Routing route(const at::Tensor& scores, const at::Tensor& bias,
              const parallel::ExpertsOptions& options);

// The loss of balance without its factor (zeropage/experts.h). []
at::Tensor imbalance(const Routing& routing);

}  // namespace zeropage::fused

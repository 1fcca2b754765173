// 8-bit states (quantisation_map.h) as fp32 and back, for those who keep or change them elsewhere than
// in a step. What is dequantised and quantised again has the same bits, scales included: a block's
// largest stays what it is, and the others are their codes' values.
//
// codes: [numel] uint8. scales: [blocks] fp32, one a block of kStateBlockNumel; first_in_block: of the
// first code. On any device; the work is the host's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>

#include <ATen/core/TensorBody.h>

#include "optim/fused_step.h"
#include "optim/quantisation_map.h"

namespace zeropage::optim {

// The sign of a state, by its place in state_names(options).
template <HasFusedStep Options>
StateSign state_sign(const Options& options, size_t index) {
  const auto signed_states =
      std::visit([](const auto& rule) { return static_cast<size_t>(rule.kSignedStates); },
                 rule_of(options, 1));
  return index < signed_states ? StateSign::kSigned : StateSign::kUnsigned;
}

// [numel] fp32 on the host.
at::Tensor dequantised_state(StateSign sign, const at::Tensor& codes, const at::Tensor& scales,
                             int64_t first_in_block);

// values: [numel] fp32 on the host. Writes codes and scales.
void quantise_state(StateSign sign, const at::Tensor& values, int64_t first_in_block,
                    const at::Tensor& codes, const at::Tensor& scales);

}  // namespace zeropage::optim

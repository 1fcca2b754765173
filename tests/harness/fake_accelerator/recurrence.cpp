#include "tests/harness/fake_accelerator/recurrence.h"

#include <optional>
#include <tuple>

#include <ATen/ATen.h>

namespace zeropage::testing {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const Optional& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// The third result, of a fused kernel for its backward, nobody asks for.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cell, const Optional& input_bias,
                                             const Optional& hidden_bias) {
  const Tensor sum = with_bias(hidden_gates, hidden_bias) + with_bias(input_gates, input_bias);
  const auto gates = sum.chunk(4, /*dim=*/1);
  const Tensor next = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next.tanh(), next, Tensor()};
}

}  // namespace

void add_recurrent_kernels(torch::Library& aten) {
  aten.impl("_thnn_fused_lstm_cell", &lstm_cell);
}

}  // namespace zeropage::testing

// The fused operators as loops over rows, for each instruction set and dtype. Everything is computed in fp32 and rounded once,
// and sums go in one order, so the bits do not depend on the set. Free of torch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fused/rows.h"
#include "optim/cpu/instructions.h"

namespace zeropage::fused::cpu {

template <typename T>
struct LoopsOf {
  // row: [numel], at least 1.
  ExponentSum (*sum_exponents)(const T* row, int64_t numel);
  // row = e^(row - largest) * factor
  void (*to_probabilities)(T* row, int64_t numel, float largest, float factor);

  void (*normalise)(const NormRows<T>& norm, int64_t begin, int64_t end);
  // Adds to of_weight and of_bias, [width]; of_bias may be null.
  void (*norm_gradient)(const NormGradientRows<T>& norm, int64_t begin, int64_t end,
                        float* of_weight, float* of_bias);

  // Rows counted through a, b and c.
  void (*rotate)(const RotaryRows<T>& rotary, int64_t begin, int64_t end);

  // output = gate sigmoid(gate) value
  void (*swiglu)(const T* gate, const T* value, T* output, int64_t numel);
  void (*swiglu_gradient)(const T* gradient, const T* gate, const T* value, T* of_gate, T* of_value,
                          int64_t numel);

  // A row: output = gelu(input + bias)
  void (*bias_gelu)(GeluForm form, const T* input, const T* bias, T* output, int64_t width);
  // Adds to of_bias, [width].
  void (*bias_gelu_gradient)(GeluForm form, const T* gradient, const T* input, const T* bias,
                             T* of_input, float* of_bias, int64_t width);
};

struct Loops {
  LoopsOf<float> of_float;
  LoopsOf<optim::BFloat16Bits> of_bfloat16;
  LoopsOf<optim::HalfBits> of_half;
};

extern const Loops kLoopsOnAnyProcessor;
#if defined(__x86_64__)
extern const Loops kLoopsWithAvx2;
extern const Loops kLoopsWithAvx512;
#endif

inline const Loops& loops(optim::cpu::Instructions most = optim::cpu::Instructions::kAvx512) {
  switch (optim::cpu::usable(most)) {
#if defined(__x86_64__)
    case optim::cpu::Instructions::kAvx512:
      return kLoopsWithAvx512;
    case optim::cpu::Instructions::kAvx2:
      return kLoopsWithAvx2;
#endif
    default:
      return kLoopsOnAnyProcessor;
  }
}

template <typename T>
const LoopsOf<T>& loops_of(optim::cpu::Instructions most = optim::cpu::Instructions::kAvx512) {
  if constexpr (std::is_same_v<T, float>) {
    return loops(most).of_float;
  } else if constexpr (std::is_same_v<T, optim::BFloat16Bits>) {
    return loops(most).of_bfloat16;
  } else {
    return loops(most).of_half;
  }
}

}  // namespace zeropage::fused::cpu

// What the loops of cpu/ and the kernels of cuda/ are given. Free of torch and of CUDA.
#pragma once

#include <cstdint>

#include "optim/low_precision.h"

namespace zeropage::fused {

ZEROPAGE_ELEMENT void set(float& to, float value) {
  to = value;
}
template <typename Low>
ZEROPAGE_ELEMENT void set(Low& to, float value) {
  optim::assign(to, value);
}

// What e^x of a row adds up to.
struct ExponentSum {
  float largest = 0;  // of the row
  double sum = 0;     // of e^(x - largest)
};

// Rows [width] behind one another. y = (x - mean) / deviation * weight + bias; root mean squares have neither mean nor bias.
template <typename T>
struct NormRows {
  int64_t width = 0;
  double epsilon = 0;
  const T* input = nullptr;
  const T* residual = nullptr;  // added to the input; may be null
  const T* weight = nullptr;    // [width]
  const T* bias = nullptr;      // [width]; may be null
  T* sum = nullptr;             // input + residual; null where residual is
  T* output = nullptr;
  float* means = nullptr;     // [rows]; null: root mean squares
  float* inverses = nullptr;  // [rows] 1 / deviation
};

template <typename T>
struct NormGradientRows {
  int64_t width = 0;
  const T* gradient = nullptr;         // of the output
  const T* gradient_of_sum = nullptr;  // may be null
  const T* sum = nullptr;              // what was normalised
  const T* weight = nullptr;
  const float* means = nullptr;  // null: root mean squares
  const float* inverses = nullptr;
  T* of_input = nullptr;
};

// Heads of tokens: x[a][b][c][0 .. width), rotated by the angles of row c, or of row (a, c).
template <typename T>
struct RotaryRows {
  int64_t width = 0;      // even
  int64_t sizes[3] = {};  // a, b, c
  int64_t input_strides[3] = {};
  int64_t output_strides[3] = {};
  int64_t angle_strides[2] = {};  // of a, and of c
  const T* input = nullptr;
  const float* cosines = nullptr;  // [width / 2]
  const float* sines = nullptr;
  float direction = 1;  // -1: back
  T* output = nullptr;
};

enum class GeluForm : uint8_t { kExact, kTanh };

}  // namespace zeropage::fused

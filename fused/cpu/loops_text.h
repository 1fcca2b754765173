// The loops of cpu/loops.h, written once and compiled for each instruction set: by a source that defines
// ZEROPAGE_LOOPS, the name of the table, and ZEROPAGE_PART_LANES, the fp32 numbers of a register, and includes this where the set's functions are compiled. It has included loops.h
// and what that takes before, whose functions are for any processor. Free of torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "fused/cpu/loops.h"
#include "fused/cpu/vector_math.h"

namespace zeropage::fused::cpu {
namespace {

// Calls visit(first, lanes) for a row's vectors; lanes is kLanes but for the last.
template <typename Visit>
ZEROPAGE_VECTOR void for_each_vector(int64_t numel, Visit visit) {
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) visit(i, kLanes);
  if (i < numel) visit(i, numel - i);
}

template <typename T>
ZEROPAGE_VECTOR Vector load_part(const T* from, int64_t lanes, float beyond = 0) {
  return lanes == kLanes ? load(from) : load_first(from, lanes, beyond);
}

template <typename T>
ZEROPAGE_VECTOR void store_part(T* to, int64_t lanes, const Vector& values) {
  if (lanes == kLanes) {
    store(to, values);
  } else {
    store_first(to, lanes, values);
  }
}

template <typename T>
ExponentSum sum_exponents(const T* row, int64_t numel) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  Vector most = all(kNone);
  for_each_vector(
      numel, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
        const Vector values = load_part(row + i, lanes, kNone);
        most = choose(values > most, values, most);
      });
  const float largest = largest_of(most);
  LaneSum sum;
  for_each_vector(
      numel, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
        sum.add(exponential(load_part(row + i, lanes, kNone) - largest));
      });
  return {largest, sum.total()};
}

template <typename T>
void to_probabilities(T* row, int64_t numel, float largest, float factor) {
  for_each_vector(
      numel, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
        store_part(row + i, lanes, exponential(load_part(row + i, lanes) - largest) * factor);
      });
}

template <typename T>
void normalise(const NormRows<T>& norm, int64_t begin, int64_t end) {
  const int64_t width = norm.width;
  for (int64_t row = begin; row < end; ++row) {
    const T* sum = norm.input + row * width;
    if (norm.residual != nullptr) {
      T* const added = norm.sum + row * width;
      for_each_vector(
          width, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
            store_part(
                added + i, lanes,
                load_part(sum + i, lanes) + load_part(norm.residual + row * width + i, lanes));
          });
      sum = added;
    }
    double mean = 0;
    if (norm.means != nullptr) {
      // About the first number: a row that is far from zero, or of one number, loses nothing.
      const float about = optim::to_float(sum[0]);
      LaneSum total;
      for_each_vector(
          width, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
            total.add(load_part(sum + i, lanes, about) - about);
          });
      mean = about + total.total() / static_cast<double>(width);
      norm.means[row] = static_cast<float>(mean);
    }
    const auto centre = static_cast<float>(mean);
    LaneSum squares;
    for_each_vector(
        width, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
          const Vector off = load_part(sum + i, lanes, centre) - centre;
          squares.add(off * off);
        });
    const auto inverse = static_cast<float>(
        1 / std::sqrt(squares.total() / static_cast<double>(width) + norm.epsilon));
    norm.inverses[row] = inverse;
    T* const output = norm.output + row * width;
    for_each_vector(
        width, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
          Vector y =
              (load_part(sum + i, lanes) - centre) * inverse * load_part(norm.weight + i, lanes);
          if (norm.bias != nullptr) y = y + load_part(norm.bias + i, lanes);
          store_part(output + i, lanes, y);
        });
  }
}

// With n = (x - mean) inverse and g = gradient weight: of_input = inverse (g - mean(g) - n mean(g n)); root mean squares have no
// mean(g).
template <typename T>
void norm_gradient(const NormGradientRows<T>& norm, int64_t begin, int64_t end, float* of_weight,
                   float* of_bias) {
  const int64_t width = norm.width;
  for (int64_t row = begin; row < end; ++row) {
    const T* const sum = norm.sum + row * width;
    const T* const gradient = norm.gradient + row * width;
    const float centre = norm.means == nullptr ? 0 : norm.means[row];
    const float inverse = norm.inverses[row];
    LaneSum of_gradient;
    LaneSum of_product;
    for_each_vector(
        width, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
          const Vector normed = (load_part(sum + i, lanes, centre) - centre) * inverse;
          const Vector from_above = load_part(gradient + i, lanes);
          const Vector g = from_above * load_part(norm.weight + i, lanes);
          if (norm.means != nullptr) of_gradient.add(g);
          of_product.add(g * normed);
          store_part(of_weight + i, lanes, load_part(of_weight + i, lanes) + from_above * normed);
          if (of_bias != nullptr)
            store_part(of_bias + i, lanes, load_part(of_bias + i, lanes) + from_above);
        });
    const auto mean_gradient =
        norm.means == nullptr
            ? 0.0F
            : static_cast<float>(of_gradient.total() / static_cast<double>(width));
    const auto mean_product = static_cast<float>(of_product.total() / static_cast<double>(width));
    for_each_vector(
        width, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
          const Vector normed = (load_part(sum + i, lanes) - centre) * inverse;
          const Vector g = load_part(gradient + i, lanes) * load_part(norm.weight + i, lanes);
          Vector result = (g - mean_gradient - normed * mean_product) * inverse;
          if (norm.gradient_of_sum != nullptr)
            result = result + load_part(norm.gradient_of_sum + row * width + i, lanes);
          store_part(norm.of_input + row * width + i, lanes, result);
        });
  }
}

template <typename T>
void rotate(const RotaryRows<T>& rotary, int64_t begin, int64_t end) {
  const int64_t half = rotary.width / 2;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t c = row % rotary.sizes[2];
    const int64_t b = row / rotary.sizes[2] % rotary.sizes[1];
    const int64_t a = row / rotary.sizes[2] / rotary.sizes[1];
    const auto place = [a, b, c](const int64_t* strides) {
      return a * strides[0] + b * strides[1] + c * strides[2];
    };
    const T* const from = rotary.input + place(rotary.input_strides);
    T* const to = rotary.output + place(rotary.output_strides);
    const int64_t angle = a * rotary.angle_strides[0] + c * rotary.angle_strides[1];
    for_each_vector(
        half, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
          const Vector cosine = load_part(rotary.cosines + angle + i, lanes);
          const Vector sine = load_part(rotary.sines + angle + i, lanes) * rotary.direction;
          const Vector first = load_part(from + i, lanes);
          const Vector second = load_part(from + half + i, lanes);
          store_part(to + i, lanes, first * cosine - second * sine);
          store_part(to + half + i, lanes, second * cosine + first * sine);
        });
  }
}

template <typename T>
void swiglu(const T* gate, const T* value, T* output, int64_t numel) {
  for_each_vector(
      numel, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
        const Vector g = load_part(gate + i, lanes);
        store_part(output + i, lanes, g * sigmoid(g) * load_part(value + i, lanes));
      });
}

template <typename T>
void swiglu_gradient(const T* gradient, const T* gate, const T* value, T* of_gate, T* of_value,
                     int64_t numel) {
  for_each_vector(
      numel, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
        const Vector g = load_part(gate + i, lanes);
        const Vector from_above = load_part(gradient + i, lanes);
        const Vector s = sigmoid(g);
        store_part(of_value + i, lanes, from_above * g * s);
        store_part(of_gate + i, lanes,
                   from_above * load_part(value + i, lanes) * s * (1.0F + g * (1.0F - s)));
      });
}

// gelu(x) = x part(x), and how it grows.
struct GeluParts {
  Vector part;
  Vector slope;
};

// Hendrycks and Gimpel, 2016: with the error function, and with tanh, which is 2 sigmoid(2 u) - 1.
ZEROPAGE_VECTOR GeluParts gelu_parts(GeluForm form, const Vector& x) {
  if (form == GeluForm::kExact) {
    const Vector part = 0.5F + 0.5F * error_function(x * 0.70710678118654752F);
    return {part, part + x * 0.39894228040143268F * exponential(x * x * -0.5F)};
  }
  constexpr float kScale = 0.79788456080286536F;  // sqrt(2 / pi)
  constexpr float kCubic = 0.044715F;
  const Vector square = x * x;
  const Vector part = sigmoid(x * (2 * kScale) * (1.0F + square * kCubic));
  return {part, part + x * part * (1.0F - part) * (2 * kScale) * (1.0F + square * (3 * kCubic))};
}

template <typename T>
void bias_gelu(GeluForm form, const T* input, const T* bias, T* output, int64_t width) {
  for_each_vector(
      width, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
        const Vector x = load_part(input + i, lanes) + load_part(bias + i, lanes);
        store_part(output + i, lanes, x * gelu_parts(form, x).part);
      });
}

template <typename T>
void bias_gelu_gradient(GeluForm form, const T* gradient, const T* input, const T* bias,
                        T* of_input, float* of_bias, int64_t width) {
  for_each_vector(
      width, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
        const Vector x = load_part(input + i, lanes) + load_part(bias + i, lanes);
        const Vector result = load_part(gradient + i, lanes) * gelu_parts(form, x).slope;
        store_part(of_input + i, lanes, result);
        store_part(of_bias + i, lanes, load_part(of_bias + i, lanes) + result);
      });
}

template <typename T>
constexpr LoopsOf<T> loops_of_set() {
  return {.sum_exponents = &sum_exponents<T>,
          .to_probabilities = &to_probabilities<T>,
          .normalise = &normalise<T>,
          .norm_gradient = &norm_gradient<T>,
          .rotate = &rotate<T>,
          .swiglu = &swiglu<T>,
          .swiglu_gradient = &swiglu_gradient<T>,
          .bias_gelu = &bias_gelu<T>,
          .bias_gelu_gradient = &bias_gelu_gradient<T>};
}

}  // namespace

const Loops ZEROPAGE_LOOPS = {.of_float = loops_of_set<float>(),
                              .of_bfloat16 = loops_of_set<optim::BFloat16Bits>(),
                              .of_half = loops_of_set<optim::HalfBits>()};

}  // namespace zeropage::fused::cpu

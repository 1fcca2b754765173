#include <cmath>

#include "fused/cuda/rows.h"
#include "optim/cuda/launch.cuh"

namespace zeropage::fused::cuda {
namespace {

using optim::to_float;
using optim::cuda::blocks_for;
using optim::cuda::kThreads;
using optim::cuda::launch;

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffU;
constexpr float kNone = -INFINITY;

// A block's sum, to all of its threads. shared: [kWarps].
__device__ __forceinline__ float sum_of_block(float mine, float* shared) {
#pragma unroll
  for (int stride = kWarp / 2; stride > 0; stride /= 2)
    mine += __shfl_down_sync(kAllLanes, mine, stride);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = mine;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += shared[warp];
  __syncthreads();
  return sum;
}

// A block a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) normalise_rows(NormRows<T> norm, int64_t rows) {
  __shared__ float shared[kWarps];
  const int64_t width = norm.width;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* sum = norm.input + row * width;
    if (norm.residual != nullptr) {
      T* const added = norm.sum + row * width;
      for (int64_t i = threadIdx.x; i < width; i += kThreads) {
        set(added[i], to_float(sum[i]) + to_float(norm.residual[row * width + i]));
      }
      sum = added;
    }
    // Each thread reads what it wrote itself.
    float mean = 0;
    if (norm.means != nullptr) {
      float mine = 0;
      // About the first number of the input, as another thread writes the sum's.
      const float about = to_float(norm.input[row * width]);
      for (int64_t i = threadIdx.x; i < width; i += kThreads) mine += to_float(sum[i]) - about;
      mean = about + sum_of_block(mine, shared) / static_cast<float>(width);
    }
    float mine = 0;
    for (int64_t i = threadIdx.x; i < width; i += kThreads) {
      const float off = to_float(sum[i]) - mean;
      mine += off * off;
    }
    const float square = sum_of_block(mine, shared) / static_cast<float>(width);
    const float inverse = 1.0F / sqrtf(square + static_cast<float>(norm.epsilon));
    if (threadIdx.x == 0) {
      norm.inverses[row] = inverse;
      if (norm.means != nullptr) norm.means[row] = mean;
    }
    for (int64_t i = threadIdx.x; i < width; i += kThreads) {
      float y = (to_float(sum[i]) - mean) * inverse * to_float(norm.weight[i]);
      if (norm.bias != nullptr) y += to_float(norm.bias[i]);
      set(norm.output[row * width + i], y);
    }
  }
}

// A block a part of the rows, whose sums over rows are its own.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    norm_gradient_rows(NormGradientRows<T> norm, int64_t rows, int64_t parts, float* of_weight,
                       float* of_bias) {
  __shared__ float shared[kWarps];
  const int64_t width = norm.width;
  for (int64_t part = blockIdx.x; part < parts; part += gridDim.x) {
    for (int64_t row = part; row < rows; row += parts) {
      const T* const sum = norm.sum + row * width;
      const T* const gradient = norm.gradient + row * width;
      const float mean = norm.means == nullptr ? 0 : norm.means[row];
      const float inverse = norm.inverses[row];
      float of_gradient = 0, of_product = 0;
      for (int64_t i = threadIdx.x; i < width; i += kThreads) {
        const float normed = (to_float(sum[i]) - mean) * inverse;
        const float from_above = to_float(gradient[i]);
        const float g = from_above * to_float(norm.weight[i]);
        of_gradient += g;
        of_product += g * normed;
        of_weight[part * width + i] += from_above * normed;
        if (of_bias != nullptr) of_bias[part * width + i] += from_above;
      }
      const float mean_gradient =
          norm.means == nullptr ? 0 : sum_of_block(of_gradient, shared) / static_cast<float>(width);
      const float mean_product = sum_of_block(of_product, shared) / static_cast<float>(width);
      for (int64_t i = threadIdx.x; i < width; i += kThreads) {
        const float normed = (to_float(sum[i]) - mean) * inverse;
        const float g = to_float(gradient[i]) * to_float(norm.weight[i]);
        float result = (g - mean_gradient - normed * mean_product) * inverse;
        if (norm.gradient_of_sum != nullptr)
          result += to_float(norm.gradient_of_sum[row * width + i]);
        set(norm.of_input[row * width + i], result);
      }
    }
  }
}

// A thread a pair of elements.
template <typename T>
__global__ void __launch_bounds__(kThreads) rotate_pairs(RotaryRows<T> rotary, int64_t pairs) {
  const int64_t half = rotary.width / 2;
  for (int64_t pair = blockIdx.x * int64_t{kThreads} + threadIdx.x; pair < pairs;
       pair += gridDim.x * int64_t{kThreads}) {
    const int64_t i = pair % half, row = pair / half;
    const int64_t c = row % rotary.sizes[2], b = row / rotary.sizes[2] % rotary.sizes[1],
                  a = row / rotary.sizes[2] / rotary.sizes[1];
    const T* const from = rotary.input + a * rotary.input_strides[0] + b * rotary.input_strides[1] +
                          c * rotary.input_strides[2];
    T* const to = rotary.output + a * rotary.output_strides[0] + b * rotary.output_strides[1] +
                  c * rotary.output_strides[2];
    const int64_t angle = a * rotary.angle_strides[0] + c * rotary.angle_strides[1] + i;
    const float cosine = rotary.cosines[angle], sine = rotary.sines[angle] * rotary.direction;
    const float first = to_float(from[i]), second = to_float(from[half + i]);
    set(to[i], first * cosine - second * sine);
    set(to[half + i], second * cosine + first * sine);
  }
}

__device__ __forceinline__ float sigmoid(float x) {
  return 1.0F / (1.0F + expf(-x));
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    swiglu_elements(const T* gate, const T* value, T* output, int64_t numel) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < numel;
       i += gridDim.x * int64_t{kThreads}) {
    const float g = to_float(gate[i]);
    set(output[i], g * sigmoid(g) * to_float(value[i]));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    swiglu_gradient_elements(const T* gradient, const T* gate, const T* value, T* of_gate,
                             T* of_value, int64_t numel) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < numel;
       i += gridDim.x * int64_t{kThreads}) {
    const float g = to_float(gate[i]), from_above = to_float(gradient[i]), s = sigmoid(g);
    set(of_value[i], from_above * g * s);
    set(of_gate[i], from_above * to_float(value[i]) * s * (1.0F + g * (1.0F - s)));
  }
}

struct GeluParts {
  float part;  // gelu(x) / x
  float slope;
};

// cpu/loops_text.h has the formulas.
__device__ __forceinline__ GeluParts gelu_parts(GeluForm form, float x) {
  if (form == GeluForm::kExact) {
    const float part = 0.5F + 0.5F * erff(x * 0.70710678118654752F);
    return {part, part + x * 0.39894228040143268F * expf(x * x * -0.5F)};
  }
  constexpr float kTwiceScale = 2 * 0.79788456080286536F;
  constexpr float kCubic = 0.044715F;
  const float part = sigmoid(x * kTwiceScale * (1.0F + x * x * kCubic));
  return {part, part + x * part * (1.0F - part) * kTwiceScale * (1.0F + x * x * (3 * kCubic))};
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    bias_gelu_elements(GeluForm form, const T* input, const T* bias, T* output, int64_t numel,
                       int64_t width) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < numel;
       i += gridDim.x * int64_t{kThreads}) {
    const float x = to_float(input[i]) + to_float(bias[i % width]);
    set(output[i], x * gelu_parts(form, x).part);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    bias_gelu_gradient_rows(GeluForm form, const T* gradient, const T* input, const T* bias,
                            T* of_input, float* of_bias, int64_t rows, int64_t width,
                            int64_t parts) {
  for (int64_t part = blockIdx.x; part < parts; part += gridDim.x) {
    for (int64_t row = part; row < rows; row += parts) {
      for (int64_t i = threadIdx.x; i < width; i += kThreads) {
        const float x = to_float(input[row * width + i]) + to_float(bias[i]);
        const float result = to_float(gradient[row * width + i]) * gelu_parts(form, x).slope;
        set(of_input[row * width + i], result);
        of_bias[part * width + i] += result;
      }
    }
  }
}

// The largest of some numbers, and the sum of e^(number - largest).
struct Exponents {
  float largest = kNone;
  float sum = 0;
};

__device__ __forceinline__ Exponents both(const Exponents& a, const Exponents& b) {
  const float largest = fmaxf(a.largest, b.largest);
  // Infinity less infinity would be no number.
  const float of_a = a.largest == largest ? a.sum : a.sum * expf(a.largest - largest);
  const float of_b = b.largest == largest ? b.sum : b.sum * expf(b.largest - largest);
  return {largest, of_a + of_b};
}

// A block a row, in one pass (Milakov and Gimelshein, 2018).
template <typename T>
__global__ void __launch_bounds__(kThreads) exponents_of_rows(LogitTile<T> tile, float* figures) {
  __shared__ float largest[kWarps];
  __shared__ float sums[kWarps];
  for (int64_t row = blockIdx.x; row < tile.rows; row += gridDim.x) {
    const T* const logits = tile.logits + row * tile.columns;
    Exponents mine;
    for (int64_t i = threadIdx.x; i < tile.columns; i += kThreads) {
      // A NaN is lost in fmaxf(), so it goes into the sum.
      const float logit = to_float(logits[i]);
      mine = both(mine, {logit, logit == logit ? 1.0F : logit});
    }
#pragma unroll
    for (int stride = kWarp / 2; stride > 0; stride /= 2) {
      const Exponents other{__shfl_down_sync(kAllLanes, mine.largest, stride),
                            __shfl_down_sync(kAllLanes, mine.sum, stride)};
      mine = both(mine, other);
    }
    if (threadIdx.x % kWarp == 0) {
      largest[threadIdx.x / kWarp] = mine.largest;
      sums[threadIdx.x / kWarp] = mine.sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      Exponents all;
      for (int warp = 0; warp < kWarps; ++warp) all = both(all, {largest[warp], sums[warp]});
      const int64_t own = tile.targets[row] - tile.first_class;
      const bool is_here = own >= 0 && own < tile.columns;
      figures[row] = all.largest;
      figures[tile.rows + row] = all.sum;
      figures[2 * tile.rows + row] = is_here ? to_float(logits[own]) - all.largest : kNone;
    }
    __syncthreads();
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    gradients_of_rows(LogitTile<T> tile, const float* own, const float* all) {
  for (int64_t row = blockIdx.x; row < tile.rows; row += gridDim.x) {
    T* const logits = tile.logits + row * tile.columns;
    const bool is_ignored = tile.targets[row] == tile.ignore_index;
    const int64_t target = tile.targets[row] - tile.first_class;
    const float factor = is_ignored ? 0 : expf(own[row] - all[row]) / all[tile.rows + row];
    for (int64_t i = threadIdx.x; i < tile.columns; i += kThreads) {
      float gradient = is_ignored ? 0 : expf(to_float(logits[i]) - own[row]) * factor;
      if (!is_ignored && i == target) gradient -= 1;
      set(logits[i], gradient);
    }
  }
}

}  // namespace

bool are_built() {
  return true;
}

template <typename T>
void normalise(const NormRows<T>& norm, int64_t rows, void* stream) {
  if (rows == 0) return;
  launch({.what = "a norm", .blocks = blocks_for(rows, 1), .stream = stream}, normalise_rows<T>,
         norm, rows);
}

template <typename T>
void norm_gradient(const NormGradientRows<T>& norm, int64_t rows, int64_t parts, float* of_weight,
                   float* of_bias, void* stream) {
  if (rows == 0) return;
  launch({.what = "a norm's gradient", .blocks = blocks_for(parts, 1), .stream = stream},
         norm_gradient_rows<T>, norm, rows, parts, of_weight, of_bias);
}

template <typename T>
void rotate(const RotaryRows<T>& rotary, int64_t rows, void* stream) {
  const int64_t pairs = rows * (rotary.width / 2);
  if (pairs == 0) return;
  launch({.what = "rotary positions", .blocks = blocks_for(pairs, kThreads), .stream = stream},
         rotate_pairs<T>, rotary, pairs);
}

template <typename T>
void swiglu(const T* gate, const T* value, T* output, int64_t numel, void* stream) {
  if (numel == 0) return;
  launch({.what = "SwiGLU", .blocks = blocks_for(numel, kThreads), .stream = stream},
         swiglu_elements<T>, gate, value, output, numel);
}

template <typename T>
void swiglu_gradient(const T* gradient, const T* gate, const T* value, T* of_gate, T* of_value,
                     int64_t numel, void* stream) {
  if (numel == 0) return;
  launch({.what = "SwiGLU's gradient", .blocks = blocks_for(numel, kThreads), .stream = stream},
         swiglu_gradient_elements<T>, gradient, gate, value, of_gate, of_value, numel);
}

template <typename T>
void bias_gelu(GeluForm form, const T* input, const T* bias, T* output, int64_t rows, int64_t width,
               void* stream) {
  const int64_t numel = rows * width;
  if (numel == 0) return;
  launch({.what = "GELU of a bias", .blocks = blocks_for(numel, kThreads), .stream = stream},
         bias_gelu_elements<T>, form, input, bias, output, numel, width);
}

template <typename T>
void bias_gelu_gradient(GeluForm form, const T* gradient, const T* input, const T* bias,
                        T* of_input, float* of_bias, int64_t rows, int64_t width, int64_t parts,
                        void* stream) {
  if (rows * width == 0) return;
  launch(
      {.what = "the gradient of a bias and GELU", .blocks = blocks_for(parts, 1), .stream = stream},
      bias_gelu_gradient_rows<T>, form, gradient, input, bias, of_input, of_bias, rows, width,
      parts);
}

template <typename T>
void sum_exponents(const LogitTile<T>& tile, float* figures, void* stream) {
  if (tile.rows == 0) return;
  launch({.what = "a softmax", .blocks = blocks_for(tile.rows, 1), .stream = stream},
         exponents_of_rows<T>, tile, figures);
}

template <typename T>
void to_gradients(const LogitTile<T>& tile, const float* own, const float* all, void* stream) {
  if (tile.rows == 0) return;
  launch({.what = "the gradient of logits", .blocks = blocks_for(tile.rows, 1), .stream = stream},
         gradients_of_rows<T>, tile, own, all);
}

ZEROPAGE_INSTANTIATE_ROWS(float)
ZEROPAGE_INSTANTIATE_ROWS(optim::BFloat16Bits)
ZEROPAGE_INSTANTIATE_ROWS(optim::HalfBits)

}  // namespace zeropage::fused::cuda

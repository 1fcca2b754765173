// The fused operators as CUDA kernels, beside the loops of cpu/loops.h: the same formulas in fp32, other orders of sums. no_cuda.cpp has
// them in builds without CUDA. stream: a cudaStream_t of the current device. Pointers are to memory of the device. Launches that fail throw.
// Free of torch and of CUDA.
//
// T: float, offload::BFloat16Bits or offload::HalfBits.
#pragma once

#include <cstdint>

#include "fused/rows.h"

namespace zeropage::fused::cuda {

// Whether there are kernels.
bool are_built();

template <typename T>
void normalise(const NormRows<T>& norm, int64_t rows, void* stream);

// of_weight: [parts, width], zeroed; of_bias too, or null. Each part is of rows part, part + parts, ...
template <typename T>
void norm_gradient(const NormGradientRows<T>& norm, int64_t rows, int64_t parts, float* of_weight,
                   float* of_bias, void* stream);

template <typename T>
void rotate(const RotaryRows<T>& rotary, int64_t rows, void* stream);

template <typename T>
void swiglu(const T* gate, const T* value, T* output, int64_t numel, void* stream);
template <typename T>
void swiglu_gradient(const T* gradient, const T* gate, const T* value, T* of_gate, T* of_value,
                     int64_t numel, void* stream);

template <typename T>
void bias_gelu(GeluForm form, const T* input, const T* bias, T* output, int64_t rows, int64_t width,
               void* stream);
// of_bias: [parts, width], zeroed.
template <typename T>
void bias_gelu_gradient(GeluForm form, const T* gradient, const T* input, const T* bias,
                        T* of_input, float* of_bias, int64_t rows, int64_t width, int64_t parts,
                        void* stream);

// A tile of logits, [rows, columns], of a rank's classes from first_class on.
template <typename T>
struct LogitTile {
  T* logits = nullptr;
  const int64_t* targets = nullptr;  // [rows] of all classes
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t first_class = 0;
  int64_t ignore_index = 0;
};

// figures: [3, rows]: of each row the largest logit, the sum of e^(logit - largest), and the target's logit less the largest; -infinity
// where the target is none of these classes.
template <typename T>
void sum_exponents(const LogitTile<T>& tile, float* figures, void* stream);
// Logits become the gradient of the sum of losses; zero for a target that is ignored. own, all: [3, rows], of these classes and of all.
template <typename T>
void to_gradients(const LogitTile<T>& tile, const float* own, const float* all, void* stream);

// The kernels of an element type, for the source that defines them and the one that stands for it.
#define ZEROPAGE_INSTANTIATE_ROWS(T)                                                            \
  template void normalise(const NormRows<T>&, int64_t, void*);                                  \
  template void norm_gradient(const NormGradientRows<T>&, int64_t, int64_t, float*, float*,     \
                              void*);                                                           \
  template void rotate(const RotaryRows<T>&, int64_t, void*);                                   \
  template void swiglu(const T*, const T*, T*, int64_t, void*);                                 \
  template void swiglu_gradient(const T*, const T*, const T*, T*, T*, int64_t, void*);          \
  template void bias_gelu(GeluForm, const T*, const T*, T*, int64_t, int64_t, void*);           \
  template void bias_gelu_gradient(GeluForm, const T*, const T*, const T*, T*, float*, int64_t, \
                                   int64_t, int64_t, void*);                                    \
  template void sum_exponents(const LogitTile<T>&, float*, void*);                              \
  template void to_gradients(const LogitTile<T>&, const float*, const float*, void*);

}  // namespace zeropage::fused::cuda

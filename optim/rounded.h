// fp32 and fp64 arithmetic whose every operation is rounded once, to nearest even, on the host and
// in CUDA kernels alike: the same inputs give the same bits. Nothing is contracted: what is to be
// fused says multiply_add. A NaN is a NaN; its sign and payload are the machine's.
//
// Host sources that include it are compiled with -ffp-contract=off. Free of torch and of CUDA.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ZEROPAGE_ELEMENT __host__ __device__ __forceinline__
#else
// Always inlined, so that what is called takes the instruction set of its caller.
#define ZEROPAGE_ELEMENT inline __attribute__((always_inline))
#endif

namespace zeropage::optim::rounded {

ZEROPAGE_ELEMENT float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

ZEROPAGE_ELEMENT float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// a b + c
ZEROPAGE_ELEMENT float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);  // std::fma, which is a call where it is not inlined
#endif
}

ZEROPAGE_ELEMENT float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

ZEROPAGE_ELEMENT float square_root(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return __builtin_sqrtf(a);
#endif
}

ZEROPAGE_ELEMENT double add(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

ZEROPAGE_ELEMENT double multiply(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// a b + c
ZEROPAGE_ELEMENT double multiply_add(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

// To an integer. a: 0 or more, below 2^53.
ZEROPAGE_ELEMENT double round_up(double a) {
  const auto whole = static_cast<double>(static_cast<int64_t>(a));
  return whole < a ? whole + 1 : whole;
}

ZEROPAGE_ELEMENT uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return __builtin_bit_cast(uint32_t, value);
#endif
}

ZEROPAGE_ELEMENT uint64_t bits_of(double value) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint64_t>(__double_as_longlong(value));
#else
  return __builtin_bit_cast(uint64_t, value);
#endif
}

ZEROPAGE_ELEMENT double double_of(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(static_cast<int64_t>(bits));
#else
  return __builtin_bit_cast(double, bits);
#endif
}

ZEROPAGE_ELEMENT float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

}  // namespace zeropage::optim::rounded

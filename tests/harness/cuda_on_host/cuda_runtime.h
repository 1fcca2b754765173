// What our .cu files use of CUDA, for the host's compiler: with this folder before CUDA's headers,
// g++ compiles a .cu file as C++, and its launches run the kernels in host memory before they
// return. What is not here does not compile; overloads are CUDA's own.
//
// Shared memory is static: a block finds in it what the block before left. Memory that is aligned
// too little for its type is found by -fsanitize=alignment, races by the other order (lockstep.h).
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>

#include "tests/harness/cuda_on_host/lockstep.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

#define ZEROPAGE_VECTORS(element, name)                                       \
  struct alignas(2 * sizeof(element)) name##2 {                               \
    element x, y;                                                             \
  };                                                                          \
  struct alignas(4 * sizeof(element)) name##4 {                               \
    element x, y, z, w;                                                       \
  };                                                                          \
  inline name##2 make_##name##2(element x, element y) {                       \
    return {x, y};                                                            \
  }                                                                           \
  inline name##4 make_##name##4(element x, element y, element z, element w) { \
    return {x, y, z, w};                                                      \
  }
ZEROPAGE_VECTORS(uint8_t, uchar)
ZEROPAGE_VECTORS(uint16_t, ushort)
ZEROPAGE_VECTORS(int32_t, int)
ZEROPAGE_VECTORS(uint32_t, uint)
ZEROPAGE_VECTORS(float, float)
#undef ZEROPAGE_VECTORS
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
struct alignas(16) double2 {
  double x, y;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned along_x = 1) : x(along_x) {}  // implicit, as CUDA's is
};

// One dimension: .y and .z do not compile.
inline const zeropage::testing::lockstep::Along& threadIdx =
    zeropage::testing::lockstep::here().thread;
inline const zeropage::testing::lockstep::Along& blockIdx =
    zeropage::testing::lockstep::here().block;
inline zeropage::testing::lockstep::Along blockDim;
inline zeropage::testing::lockstep::Along gridDim;

// --- Runtime ---

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
using cudaStream_t = struct CUstream_st*;

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

namespace zeropage::testing::cuda_on_host {

// How launches from here on run.
struct Device {
  int processors = 1;
  lockstep::Order order = lockstep::Order::kForward;
  int launches = 0;  // so far
};
inline Device device;

}  // namespace zeropage::testing::cuda_on_host

inline const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "cudaErrorInvalidConfiguration";
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid configuration argument";
}
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* index) {
  *index = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr /*which*/, int /*index*/) {
  *value = zeropage::testing::cuda_on_host::device.processors;
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  using namespace zeropage::testing;
  constexpr unsigned kMostThreads = 1024;
  const unsigned blocks = config->gridDim.x;
  const unsigned threads = config->blockDim.x;
  if (blocks == 0 || threads == 0 || threads > kMostThreads || config->dynamicSmemBytes != 0) {
    return cudaErrorInvalidConfiguration;
  }
  ++cuda_on_host::device.launches;
  ::gridDim = {blocks};
  ::blockDim = {threads};
  const auto body = [&](Parameters... values) {
    lockstep::run_grid({.blocks = blocks, .threads = threads, .order = cuda_on_host::device.order},
                       [&] { kernel(values...); });
  };
  body(std::forward<Arguments>(arguments)...);
  return cudaSuccess;
}

// --- Threads of a block and lanes of a warp ---

namespace zeropage::testing::cuda_on_host {

template <typename Value>
concept Shuffled = std::is_arithmetic_v<Value> &&(sizeof(Value) == 4 || sizeof(Value) == 8);

template <Shuffled Value>
Value shuffled(const char* name, uint32_t mask, Value mine, unsigned source) {
  using Bits = std::conditional_t<sizeof(Value) == 4, uint32_t, uint64_t>;
  const auto taken = lockstep::take_from(name, mask, std::bit_cast<Bits>(mine), source);
  return std::bit_cast<Value>(static_cast<Bits>(taken));
}

// The reduction of what the lanes of the mask gave.
template <typename Value, typename Both>
Value reduced(const char* name, uint32_t mask, Value mine, Both both) {
  const auto lanes = lockstep::meet_lanes(name, mask, static_cast<uint32_t>(mine));
  Value all = mine;
  for (unsigned lane = 0; lane < lockstep::kWarp; ++lane) {
    const bool other = (mask >> lane & 1U) != 0 && lane != lockstep::here().lane();
    if (other) all = both(all, static_cast<Value>(lanes[lane]));
  }
  return all;
}

}  // namespace zeropage::testing::cuda_on_host

inline void __syncthreads() {
  zeropage::testing::lockstep::meet_block("__syncthreads");
}
inline void __syncwarp(unsigned mask = 0xffffffffU) {
  zeropage::testing::lockstep::meet_lanes("__syncwarp", mask, 0);
}

template <zeropage::testing::cuda_on_host::Shuffled Value>
Value __shfl_sync(unsigned mask, Value mine, int lane) {
  using namespace zeropage::testing;
  return cuda_on_host::shuffled("__shfl_sync", mask, mine, static_cast<unsigned>(lane) % 32);
}
template <zeropage::testing::cuda_on_host::Shuffled Value>
Value __shfl_xor_sync(unsigned mask, Value mine, int lanes) {
  using namespace zeropage::testing;
  const unsigned source = (lockstep::here().lane() ^ static_cast<unsigned>(lanes)) % 32;
  return cuda_on_host::shuffled("__shfl_xor_sync", mask, mine, source);
}
template <zeropage::testing::cuda_on_host::Shuffled Value>
Value __shfl_down_sync(unsigned mask, Value mine, unsigned distance) {
  using namespace zeropage::testing;
  const unsigned lane = lockstep::here().lane();
  const unsigned source = lane + distance < 32 ? lane + distance : lane;
  return cuda_on_host::shuffled("__shfl_down_sync", mask, mine, source);
}
template <zeropage::testing::cuda_on_host::Shuffled Value>
Value __shfl_up_sync(unsigned mask, Value mine, unsigned distance) {
  using namespace zeropage::testing;
  const unsigned lane = lockstep::here().lane();
  const unsigned source = distance <= lane ? lane - distance : lane;
  return cuda_on_host::shuffled("__shfl_up_sync", mask, mine, source);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  using namespace zeropage::testing;
  const uint32_t bit = predicate != 0 ? 1U << lockstep::here().lane() : 0;
  return cuda_on_host::reduced("__ballot_sync", mask, bit, std::bit_or<uint32_t>());
}
inline int __any_sync(unsigned mask, int predicate) {
  using namespace zeropage::testing;
  return cuda_on_host::reduced("__any_sync", mask, predicate != 0 ? 1 : 0, std::bit_or<int>());
}
inline int __all_sync(unsigned mask, int predicate) {
  using namespace zeropage::testing;
  return cuda_on_host::reduced("__all_sync", mask, predicate != 0 ? 1 : 0, std::bit_and<int>());
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned mine) {
  using namespace zeropage::testing;
  const auto larger = [](unsigned a, unsigned b) { return a > b ? a : b; };
  return cuda_on_host::reduced("__reduce_max_sync", mask, mine, larger);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned mine) {
  using namespace zeropage::testing;
  const auto smaller = [](unsigned a, unsigned b) { return a < b ? a : b; };
  return cuda_on_host::reduced("__reduce_min_sync", mask, mine, smaller);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned mine) {
  using namespace zeropage::testing;
  return cuda_on_host::reduced("__reduce_add_sync", mask, mine, std::plus<unsigned>());
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned mine) {
  using namespace zeropage::testing;
  return cuda_on_host::reduced("__reduce_or_sync", mask, mine, std::bit_or<unsigned>());
}

// --- Memory and bits ---

template <typename Value>
concept CudaAdds = std::same_as<Value, int> || std::same_as<Value, unsigned> ||
    std::same_as<Value, unsigned long long>;

// One thread runs at a time.
template <CudaAdds Value>
Value atomicAdd(Value* to, Value more) {
  return std::exchange(*to, *to + more);
}
template <CudaAdds Value>
Value atomicOr(Value* to, Value more) {
  return std::exchange(*to, *to | more);
}
template <CudaAdds Value>
Value atomicMax(Value* to, Value other) {
  return std::exchange(*to, *to > other ? *to : other);
}
inline void __threadfence() {}

template <typename Value>
Value __ldg(const Value* from) {
  return *from;
}
template <typename Value>
Value __ldcs(const Value* from) {
  return *from;
}
template <typename Value>
void __stwb(Value* to, Value value) {
  *to = value;
}
template <typename Value>
void __stcs(Value* to, Value value) {
  *to = value;
}

inline int __popc(unsigned bits) {
  return std::popcount(bits);
}
inline int __ffs(int bits) {
  return __builtin_ffs(bits);
}
inline int __clz(int bits) {
  return std::countl_zero(static_cast<unsigned>(bits));
}
inline int __clzll(long long bits) {
  return std::countl_zero(static_cast<unsigned long long>(bits));
}

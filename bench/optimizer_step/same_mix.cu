#include "bench/optimizer_step/same_mix.h"
#include "optim/cuda/launch.cuh"

namespace optimizer_step {
namespace {

using zeropage::optim::cuda::kThreads;

__device__ float4& quad_of(float* buffer, int64_t i) {
  return reinterpret_cast<float4*>(buffer)[i];
}

__device__ float4 times(float4 quad, float factor) {
  return make_float4(quad.x * factor, quad.y * factor, quad.z * factor, quad.w * factor);
}

__global__ void touch(SameMix mix, int64_t quads) {
  const int64_t stride = gridDim.x * int64_t{kThreads};
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < quads; i += stride) {
    const float4 gradient = times(reinterpret_cast<const float4*>(mix.gradient)[i], mix.zero);
    const float4 value = times(quad_of(mix.values, i), mix.one);
    const float4 first = times(quad_of(mix.states[0], i), mix.one);
    const float4 second = times(quad_of(mix.states[1], i), mix.one);
    quad_of(mix.values, i) = make_float4(value.x + gradient.x, value.y + gradient.y,
                                         value.z + gradient.z, value.w + gradient.w);
    quad_of(mix.states[0], i) = first;
    quad_of(mix.states[1], i) = second;
  }
}

}  // namespace

void touch_on_cuda(const SameMix& mix, void* stream) {
  const int64_t quads = mix.numel / 4;
  const unsigned blocks = zeropage::optim::cuda::blocks_for(quads, kThreads);
  touch<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(mix, quads);
  zeropage::optim::cuda::check(cudaGetLastError(), "the launch of the same mix of bytes");
}

}  // namespace optimizer_step

// What the kernels here share: how many blocks, the launch, and what one that failed says.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cuda_runtime.h>
#include <stdexcept>
#include <string>
#include <utility>

namespace zeropage::optim::cuda {

inline constexpr int kThreads = 256;
// Enough waves that the last one, which fills the device in part, counts for little; few enough
// that what a block does once does not count either.
inline constexpr int64_t kBlocksPerProcessor = 64;

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("offload on CUDA: ") + what + " failed with " +
                           cudaGetErrorName(error) + ", " + cudaGetErrorString(error) +
                           "; an earlier kernel may be the cause: set CUDA_LAUNCH_BLOCKING=1 to "
                           "learn which");
}

// Blocks of a grid-stride loop in which each block takes `per_block` of `count` at a time.
inline unsigned blocks_for(int64_t count, int64_t per_block) {
  int device = 0;
  int processors = 0;
  check(cudaGetDevice(&device), "asking for the current device");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
        "asking for the number of multiprocessors");
  const int64_t needed = (count + per_block - 1) / per_block;
  return static_cast<unsigned>(std::clamp<int64_t>(needed, 1, processors * kBlocksPerProcessor));
}

struct Launch {
  const char* what = "";  // in errors, such as "a fused step"
  unsigned blocks = 0;
  void* stream = nullptr;  // a cudaStream_t of the current device
  unsigned threads = kThreads;
};

// Every launch goes through it: `<<<...>>>` is no C++, and the host's compiler builds kernels too
// (tests/harness/cuda_on_host).
template <typename... Parameters, typename... Arguments>
void launch(const Launch& how, void (*kernel)(Parameters...), Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(how.blocks);
  config.blockDim = dim3(how.threads);
  config.stream = static_cast<cudaStream_t>(how.stream);
  const cudaError_t error =
      cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  // It stays CUDA's last error too, which somebody else would report as theirs.
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  check(error, how.what);
}

}  // namespace zeropage::optim::cuda
